#include "matrix.h"

namespace specdec {

int64_t scratch_bytes(const Matrix&, int64_t) { return 0; }

void multiply(const Matrix& matrix, const float* x, int64_t x_stride, int64_t rows, float* y,
              int64_t y_stride, Store store, void*, Team team) {
  const auto* weights = static_cast<const float*>(matrix.panels);
  const Range own = team.share(matrix.out_features);
  for (int64_t row = 0; row < rows; ++row) {
    for (int64_t out = own.begin; out < own.end; ++out) {
      float sum = matrix.bias ? matrix.bias[out] : 0.0f;
      for (int64_t in = 0; in < matrix.in_features; ++in) {
        sum += x[row * x_stride + in] * weights[out * matrix.in_features + in];
      }
      float& target = y[row * y_stride + out];
      target = store == Store::kAdd ? target + sum : sum;
    }
  }
}

}  // namespace specdec

SPECDEC_EXPORT void specdec_multiply(const specdec::Matrix* matrix, const float* x, int64_t rows,
                                     float* y, void* scratch) {
#pragma omp parallel
  specdec::multiply(*matrix, x, matrix->in_features, rows, y, matrix->out_features,
                    specdec::Store::kWrite, scratch, specdec::Team::current());
}
