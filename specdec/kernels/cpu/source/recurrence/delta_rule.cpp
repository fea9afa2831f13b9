// The recurrence of one head, a few columns of its memory at a time.
#include "recurrence/delta_rule.h"

#include "base/simd_math.h"

namespace specdec {
namespace {

// Some columns of a memory: [key_dim, columns].
struct MemoryPart {
  float* begin;
  int64_t stride;

  float* row(int64_t index) const { return begin + index * stride; }
};

// Columns of a head's memory in kVectors vectors, of which the last has `tail` columns.
template <int kVectors>
struct Columns {
  int64_t tail;

  SPECDEC_INLINE Floats load_vector(const float* from, int vector) const {
    const float* const first = from + vector * kLanes;
    if (vector + 1 < kVectors || tail == kLanes) return load(first);
    return load_partial(first, tail);
  }
  SPECDEC_INLINE void store_vector(float* to, int vector, Floats value) const {
    float* const first = to + vector * kLanes;
    if (vector + 1 < kVectors || tail == kLanes) return store(first, value);
    store_partial(first, value, tail);
  }
};

// Write what the memory `from` has for a key to `sums` [kVectors].
template <int kVectors>
SPECDEC_INLINE void read_memory(Columns<kVectors> columns, MemoryPart from, const float* key,
                                int64_t key_dim, Floats* sums) {
  Floats found[kVectors] = {};
  for (int64_t i = 0; i < key_dim; ++i) {
    SPECDEC_UNROLL
    for (int vector = 0; vector < kVectors; ++vector) {
      found[vector] += key[i] * columns.load_vector(from.row(i), vector);
    }
  }
  SPECDEC_UNROLL
  for (int vector = 0; vector < kVectors; ++vector) sums[vector] = found[vector];
}

// to = decay * from + key * added, and return the sum of its products with the query in `sums`
// [kVectors]; `to` may be `from`.
template <int kVectors>
SPECDEC_INLINE void update_memory(Columns<kVectors> columns, MemoryPart from, MemoryPart to,
                                  const float* key, const float* query, float decay,
                                  int64_t key_dim, const Floats* added, Floats* sums) {
  Floats found[kVectors] = {};
  for (int64_t i = 0; i < key_dim; ++i) {
    SPECDEC_UNROLL
    for (int vector = 0; vector < kVectors; ++vector) {
      const Floats updated =
          decay * columns.load_vector(from.row(i), vector) + key[i] * added[vector];
      columns.store_vector(to.row(i), vector, updated);
      found[vector] += query[i] * updated;
    }
  }
  SPECDEC_UNROLL
  for (int vector = 0; vector < kVectors; ++vector) sums[vector] = found[vector];
}

// Run a row over the columns from `first` on; `to` may be `from`.
template <int kVectors, bool kHasDelta>
SPECDEC_INLINE void run_row(const HeadRun& run, int64_t token, int64_t first,
                            Columns<kVectors> columns, MemoryPart from, MemoryPart to) {
  const TokenScalars& scalars = run.scalars[token];
  const float* const row = run.rows.row(run.first + token);
  const float *const key = row + run.key, *const value = row + run.value + first;
  Floats added[kVectors] = {}, sums[kVectors];
  if (kHasDelta) read_memory(columns, from, key, run.key_dim, added);
  SPECDEC_UNROLL
  for (int vector = 0; vector < kVectors; ++vector) {
    const Floats known = added[vector] * (scalars.decay * scalars.key_scale);
    const Floats wanted = columns.load_vector(value, vector) - known;
    added[vector] = wanted * (scalars.share * scalars.key_scale);
  }
  update_memory(columns, from, to, key, row + run.query, scalars.decay, run.key_dim, added, sums);
  if (token < run.num_replayed) return;
  float* const output = run.outputs + (token - run.num_replayed) * run.output_stride + first;
  SPECDEC_UNROLL
  for (int vector = 0; vector < kVectors; ++vector) {
    columns.store_vector(output, vector, sums[vector] * scalars.query_scale);
  }
}

// Run all rows over the columns from `first` on. The first row reads the memory, the last committed
// one writes it, and the others have it in the scratch memory: nodes at their own places there.
template <int kVectors, bool kHasDelta>
void run_columns(const HeadRun& run, int64_t first, Columns<kVectors> columns) {
  const MemoryPart memory = {run.memory + first, run.value_dim};
  const auto scratch = [&](int64_t place) -> MemoryPart {
    return {run.scratch + place * run.key_dim * kVectors * kLanes, kVectors * kLanes};
  };
  MemoryPart from = memory;
  const int64_t num_chain = run.num_run - run.tree->num_nodes();
  for (int64_t token = 0; token < num_chain; ++token) {
    const MemoryPart to = token + 1 == run.num_committed ? memory : scratch(0);
    run_row<kVectors, kHasDelta>(run, token, first, columns, from, to);
    from = to;
  }
  for (const NodeStep& step : run.tree->steps) {
    const MemoryPart before = step.from == kBaseState ? from : scratch(step.from);
    run_row<kVectors, kHasDelta>(run, step.row, first, columns, before, scratch(step.to));
  }
}

template <bool kHasDelta>
void run_head_as(const HeadRun& run) {
  int64_t first = 0;
  constexpr int64_t kWhole = kMemoryVectors * kLanes;
  for (; first + kWhole <= run.value_dim; first += kWhole) {
    run_columns<kMemoryVectors, kHasDelta>(run, first, {kLanes});
  }
  for (; first < run.value_dim; first += kLanes) {
    const int64_t tail = std::min<int64_t>(kLanes, run.value_dim - first);
    run_columns<1, kHasDelta>(run, first, {tail});
  }
}

}  // namespace

void run_head(const HeadRun& run) {
  run.has_delta ? run_head_as<true>(run) : run_head_as<false>(run);
}

}  // namespace specdec
