// GEMM with floating-point weights.
#pragma once

#include "matrix.h"

namespace specdec {

int64_t float_scratch_bytes(const Matrix& matrix, int64_t rows);

// Convert activations to bfloat16; see `quantize_rows` in matrix.h.
void convert_to_bfloat16(const Matrix& matrix, const Activations& rows, Range own);

// See `gemm` in matrix.h; for kFloat32, kBFloat16, kFloat16 and kShortFloat32.
void gemm_float(const Matrix& matrix, const Activations& rows, float* y, int64_t y_stride,
                Store store, ThreadTeam team);

}  // namespace specdec
