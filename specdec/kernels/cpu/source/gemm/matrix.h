// Packed matrices for GEMM with few rows.
//
// Each output is one sum over the inputs in a fixed order, whatever the number of rows, so a row's
// result is the same bits alone and in any batch. Sums are in float32; in int32 for 8-bit weights;
// in both with kW8A8. Formats with narrow inputs quantize the activations first, to bfloat16 or
// int8.
#pragma once

#include <cstdint>

#include "threads/thread_team.h"

namespace specdec {

// kBFloat16, kInt8 and kW8A8 quantize activations too. kShortFloat32 does not: it stores float32
// weights whose lower 16 bits are zero without those bits, so results are the same bits as with
// kFloat32. It needs an even number of inputs.
enum class Format : int32_t {
  kFloat32 = 0,
  kBFloat16 = 1,
  kFloat16 = 2,
  kInt8 = 3,
  kW8A8 = 4,
  kShortFloat32 = 5,
};

// A packed matrix [out_features, in_features]; filled by `layers/` through ctypes.
struct Matrix {
  Format format;
  int64_t out_features, in_features;
  const void* packed;   // weights in the layout of packed_layout.h
  const float* scales;  // [out_features] for 8-bit formats, else null
  const float* bias;    // [out_features], or null
};

// Return the bytes of scratch memory that the GEMM of `rows` rows needs for all threads.
int64_t scratch_bytes(const Matrix& matrix, int64_t rows);

// Left operand of a GEMM: x [count, in_features], and scratch memory for its quantized rows.
struct Activations {
  const float* x;
  int64_t stride, count;
  void* scratch;
};

// Return whether the format quantizes activations; then every row must be quantized before the
// GEMM.
bool quantizes_rows(const Matrix& matrix);

// Quantize the rows of `own` where the format requires it.
void quantize_rows(const Matrix& matrix, const Activations& rows, Range own);

// Run a stage that quantizes all rows; no stage where the format does not quantize.
void quantize_rows(const Matrix& matrix, const Activations& rows, ThreadTeam team);

enum class Store { kOverwrite, kAccumulate };

// y = x W^T + bias, or y += x W^T + bias. Every thread of the team calls it with the same arguments
// and with complete, quantized rows. Each output is written by one thread; on return all are
// written. y: [rows.count, out_features] with stride y_stride.
void gemm(const Matrix& matrix, const Activations& rows, float* y, int64_t y_stride, Store store,
          ThreadTeam team);

}  // namespace specdec
