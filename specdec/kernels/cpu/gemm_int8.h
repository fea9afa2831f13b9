// Products with 8-bit weights, in exact integers (docs/adr/0007 and 0014).
//
// Inputs are scaled so that their largest magnitude is 127, and rounded to integers: the first
// digit. With kInt8 all of a row share the scale, and what rounding left is a second digit, in
// steps of 1/254. With kW8A8 each kW8A8Group of them have a scale of their own, and one digit.
// Digits are multiplied by the weights in int32, which is exact, and scaled back; groups add up in
// float32.
#pragma once

#include "matrix.h"

namespace specdec {

int64_t int8_scratch_bytes(const Matrix& matrix, int64_t rows);

// See `round_rows` and `multiply` in matrix.h, for kInt8 and kW8A8. A row that holds a NaN or an
// infinity becomes NaN.
void quantize_to_int8(const Matrix& matrix, const Activations& rows, Range own);
void gemm_int8(const Matrix& matrix, const Activations& rows, float* y, int64_t y_stride,
               Store store, ThreadTeam team);

}  // namespace specdec
