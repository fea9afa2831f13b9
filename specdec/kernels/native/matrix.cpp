#include "matrix.h"

#include "float_product.h"

namespace specdec {

int64_t scratch_bytes(const Matrix&, int64_t) { return 0; }

void multiply(const Matrix& matrix, const float* x, int64_t x_stride, int64_t rows, float* y,
              int64_t y_stride, Store store, void*, Team team) {
  multiply_floats(matrix, x, x_stride, rows, y, y_stride, store, team);
}

}  // namespace specdec

SPECDEC_EXPORT void specdec_multiply(const specdec::Matrix* matrix, const float* x,
                                     int64_t x_stride, int64_t rows, float* y, int64_t y_stride,
                                     bool adds, void* scratch) {
  const auto store = adds ? specdec::Store::kAdd : specdec::Store::kWrite;
#pragma omp parallel
  specdec::multiply(*matrix, x, x_stride, rows, y, y_stride, store, scratch,
                    specdec::Team::current());
}
