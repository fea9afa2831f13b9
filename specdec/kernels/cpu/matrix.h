// Matrices held for products with few rows, and those products.
//
// Every output is one sum over the inputs in a fixed order, whatever the number of rows: a row's
// result is the same bits alone and in any batch. Sums are in float32, in int32 for 8-bit weights,
// and with kW8A8 in both. Rows are rounded first, to bfloat16 or to 8-bit digits, where the format
// says so.
#pragma once

#include <cstdint>

#include "thread_team.h"

namespace specdec {

// kBFloat16, kInt8 and kW8A8 round rows too. kShortFloat32 does not: float32 whose last 16 bits are
// zero and left out, so that products are the same bits as with kFloat32. For an even number of
// inputs.
enum class Format : int32_t {
  kFloat32 = 0,
  kBFloat16 = 1,
  kFloat16 = 2,
  kInt8 = 3,
  kW8A8 = 4,
  kShortFloat32 = 5,
};

// A packed matrix [out_features, in_features]; `layers/` fills it by way of ctypes.
struct Matrix {
  Format format;
  int64_t out_features, in_features;
  const void* packed;   // the weights, as panels.h lays them out
  const float* scales;  // [out_features] of 8-bit formats, else null
  const float* bias;    // [out_features], or null
};

// Bytes of scratch memory that the product of `rows` rows needs, on all threads together.
int64_t scratch_bytes(const Matrix& matrix, int64_t rows);

// What a matrix is multiplied by: x [count, in_features], and scratch memory for what its format
// rounds them to.
struct Activations {
  const float* x;
  int64_t stride, count;
  void* scratch;
};

// Whether the format rounds rows. If so, each has to be rounded before they are multiplied.
bool quantizes_rows(const Matrix& matrix);

// Rounds those of `own`, where the format does.
void quantize_rows(const Matrix& matrix, const Activations& rows, Range own);

// A stage that rounds all; none where the format does not.
void quantize_rows(const Matrix& matrix, const Activations& rows, ThreadTeam team);

enum class Store { kOverwrite, kAccumulate };

// y = x W^T + bias, or y += that. Every thread of the team calls it, with the same arguments and
// with the rows complete and rounded; one of them writes each output, and all are written when it
// returns. y: [rows.count, out_features] with stride y_stride.
void gemm(const Matrix& matrix, const Activations& rows, float* y, int64_t y_stride, Store store,
          ThreadTeam team);

}  // namespace specdec
