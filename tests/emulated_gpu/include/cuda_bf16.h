/* What CuPy's kernels need of CUDA's header of this name. */
#ifndef EMULATED_CUDA_BF16_H
#define EMULATED_CUDA_BF16_H

struct __nv_bfloat16_raw {
    unsigned short x;
};

struct __nv_bfloat16 {
    unsigned short bits;
    __nv_bfloat16() = default;
    __nv_bfloat16(const __nv_bfloat16_raw &raw) : bits(raw.x) {}
    template <class T, class = emulated::only_numbers<T>> __nv_bfloat16(T v) {
        unsigned wide = emulated::bits_as<unsigned>((float)v); /* to nearest, ties to even */
        bits = v != v ? 0x7fff : (unsigned short)((wide + 0x7fff + ((wide >> 16) & 1)) >> 16);
    }
    operator float() const { return emulated::bits_as<float>((unsigned)bits << 16); }
    operator __nv_bfloat16_raw() const { return {bits}; }
};

inline __nv_bfloat16 __float2bfloat16(float v) { return __nv_bfloat16(v); }
inline float __bfloat162float(__nv_bfloat16 v) { return (float)v; }
inline unsigned short __bfloat16_as_ushort(__nv_bfloat16 v) { return v.bits; }
inline __nv_bfloat16 __ushort_as_bfloat16(unsigned short v) { return __nv_bfloat16_raw{v}; }
inline bool __hisnan(__nv_bfloat16 v) { return (v.bits & 0x7fff) > 0x7f80; }
inline int __hisinf(__nv_bfloat16 v) {
    return (v.bits & 0x7fff) != 0x7f80 ? 0 : v.bits & 0x8000 ? -1 : 1;
}

#endif
