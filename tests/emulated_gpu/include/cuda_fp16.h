/* What CuPy's kernels need of CUDA's header of this name, with the compiler's 16-bit floats. */
#ifndef EMULATED_CUDA_FP16_H
#define EMULATED_CUDA_FP16_H

struct __half_raw {
    unsigned short x;
};

struct __half {
    _Float16 value;
    __half() = default;
    __half(const __half &) = default;
    __half(const __half_raw &raw) { __builtin_memcpy(&value, &raw, 2); }
    template <class T, class = emulated::only_numbers<T>> __half(T v) : value((_Float16)v) {}
    __half &operator=(const __half &) = default;
    operator float() const { return (float)value; }
    operator __half_raw() const { return emulated::bits_as<__half_raw>(value); }
};

typedef __half half;

inline __half __float2half(float v) { return __half(v); }
inline __half __float2half_rn(float v) { return __half(v); }
inline float __half2float(__half v) { return (float)v; }
inline unsigned short __half_as_ushort(__half v) { return __half_raw(v).x; }
inline __half __ushort_as_half(unsigned short v) { return __half(__half_raw{v}); }
inline bool __hisnan(__half v) { return v.value != v.value; }

#endif
