// Matrices held for products with few rows, and those products.
//
// Every output is one sum in float32 (for 8-bit weights in int32) over the inputs in a fixed order,
// whatever the number of rows: a row's result is the same bits alone and in any batch. Rows are
// rounded first, to bfloat16 or to 8-bit digits, where the format says so.
#pragma once

#include <cstdint>

#include "team.h"

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
  const void* panels;    // the weights, as panels.h lays them out
  const float* scales;   // [out_features] of 8-bit formats, else null
  const float* bias;     // [out_features], or null
};

// Bytes of scratch memory that `multiply` needs for `rows` rows, on all threads together.
int64_t scratch_bytes(const Matrix& matrix, int64_t rows);

enum class Store { kWrite, kAdd };

// y = x W^T + bias, or y += that. Every thread of the team calls it, with the same arguments and with
// x complete; one of them writes each output, and all are written when it returns.
// x: [rows, in_features] with stride x_stride; y: [rows, out_features] with stride y_stride.
void multiply(const Matrix& matrix, const float* x, int64_t x_stride, int64_t rows, float* y,
              int64_t y_stride, Store store, void* scratch, Team team);

}  // namespace specdec
