// Products with floating-point weights, in tiles of a few rows and panels that stay in registers.
#pragma once

#include "matrix.h"

namespace specdec {

int64_t float_scratch_bytes(const Matrix& matrix, int64_t rows);

// See `multiply` in matrix.h, for kFloat32, kBFloat16 and kFloat16.
void multiply_floats(const Matrix& matrix, const float* x, int64_t x_stride, int64_t rows, float* y,
                     int64_t y_stride, Store store, void* scratch, Team team);

}  // namespace specdec
