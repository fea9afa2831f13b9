// GEMM with floating-point weights.
#pragma once

#include "gemm/matrix.h"

namespace specdec {

int64_t float_scratch_bytes(const Matrix& matrix, int64_t rows);

// Convert activations to bfloat16; see `quantize_rows` in matrix.h.
void convert_to_bfloat16(const Matrix& matrix, const Activations& rows, Range own);

// See `gemm` in matrix.h; for kFloat32, kBFloat16, kFloat16 and kShortFloat32.
void gemm_float(const Matrix& matrix, const Activations& rows, float* y, int64_t y_stride,
                Store store, ThreadTeam team);

// One product of a grouped GEMM: y = x W^T, or y += x W^T; x: [rows, in_features] with stride
// x_stride, y: [rows, out_features] with stride y_stride. The format of the weights must not
// quantize activations, and the matrix has no bias.
struct GroupedProduct {
  const Matrix* matrix;
  const float* x;
  int64_t x_stride, rows;
  float* y;
  int64_t y_stride;
  Store store;
};

// Run a stage that computes independent products, which are small, so that their tasks share it.
// The bits of each output are those of `gemm_float`.
void gemm_grouped(const GroupedProduct* products, int64_t count, ThreadTeam team);

// Products of `count` matrices of equal shape, which stand below each other in `stacked`: each has
// out_features rows, and begins with a panel. x, y: those of the first product; the operands of the
// next ones are x_step and y_step further.
struct StackedProducts {
  const Matrix* stacked;
  int64_t count, out_features;
  const float* x;
  int64_t x_stride, x_step, rows;
  float* y;
  int64_t y_stride, y_step;
};

// Run a stage that computes y = x W^T of each matrix. As `gemm_grouped`.
void gemm_stacked(const StackedProducts& products, ThreadTeam team);

}  // namespace specdec
