// Products with floating-point weights, in tiles of a few rows and panels that stay in registers.
#pragma once

#include "matrix.h"

namespace specdec {

int64_t float_scratch_bytes(const Matrix& matrix, int64_t rows);

// See `round_rows` in matrix.h, for kBFloat16.
void convert_to_bfloat16(const Matrix& matrix, const Activations& rows, Range own);

// See `multiply` in matrix.h, for kFloat32, kBFloat16, kFloat16 and kShortFloat32.
void gemm_float(const Matrix& matrix, const Activations& rows, float* y, int64_t y_stride,
                Store store, ThreadTeam team);

}  // namespace specdec
