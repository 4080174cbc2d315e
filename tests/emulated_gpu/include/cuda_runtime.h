/* CuPy takes the folder in which a file of this name is for that of CUDA's headers. */
