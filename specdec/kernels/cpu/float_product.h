// Products with floating-point weights, in tiles of a few rows and panels that stay in registers.
#pragma once

#include "matrix.h"

namespace specdec {

int64_t float_scratch_bytes(const Matrix& matrix, int64_t rows);

// See `round_rows` in matrix.h, for kBFloat16.
void round_to_bfloat16(const Matrix& matrix, const Rows& rows, Range own);

// See `multiply` in matrix.h, for kFloat32, kBFloat16, kFloat16 and kShortFloat32.
void multiply_floats(const Matrix& matrix, const Rows& rows, float* y, int64_t y_stride,
                     Store store, Team team);

}  // namespace specdec
