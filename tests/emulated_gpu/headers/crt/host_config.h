/* CUDA's header of this name refuses compilers that nvcc does not know; nvcc has no part in this. */
