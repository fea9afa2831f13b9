// GEMM with 8-bit weights and exact integer sums (docs/adr/0007 and 0014).
//
// Activations are scaled so that their largest magnitude is 127, and rounded to int8. With kInt8
// all inputs of a row share one scale (dynamic per-token quantization), and the rounding error is
// quantized again, in steps of 1/254: a hi and a lo part, or one 16-bit value hi * 254 + lo where
// there is no VNNI. Their sum is exact, also beyond 32 bits, and rounded once. With kW8A8 each
// group of kW8A8Group inputs has a scale, and there is only one part. The int32 sums of each group
// are scaled back and added in float32.
#pragma once

#include "gemm/matrix.h"

namespace specdec {

int64_t int8_scratch_bytes(const Matrix& matrix, int64_t rows);

// See `quantize_rows` and `gemm` in matrix.h; for kInt8 and kW8A8. The result of a row that holds
// NaN or infinity is NaN.
void quantize_to_int8(const Matrix& matrix, const Activations& rows, Range own);
void gemm_int8(const Matrix& matrix, const Activations& rows, float* y, int64_t y_stride,
               Store store, ThreadTeam team);

}  // namespace specdec
