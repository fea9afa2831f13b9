// Attention of a batch: computes the shares of a plan, and merges their partial results.
#include "attention/attention.h"

#include "attention/split_kv_attention.h"

namespace specdec {

namespace {

// Scratch memory of one thread: for one split, and for its result.
struct ThreadScratch {
  float* begin;
  AttentionShape shape;

  SplitScratch scratch() const { return SplitScratch(begin, shape); }
  SplitResult split_result() const {
    return SplitResult(begin + SplitScratch::floats(shape), shape);
  }
};

// Memory of one share: the running result of a tile, and partial results for an earlier share.
struct ShareScratch {
  float* begin;
  AttentionShape shape;

  SplitResult running() const { return result(0); }
  SplitResult partial(int64_t index) const { return result(1 + index); }

 private:
  SplitResult result(int64_t index) const {
    return SplitResult(begin + index * SplitResult::floats(shape), shape);
  }
};

}  // namespace

int64_t AttentionPlan::floats_per_thread() const {
  return SplitScratch::floats(shape_) + SplitResult::floats(shape_);
}

int64_t AttentionPlan::floats_per_share() const {
  return (1 + max_partials_) * SplitResult::floats(shape_);
}

// One call of `attend` on one thread.
class AttentionPlan::Execution {
 public:
  Execution(const AttentionPlan& plan, const float* q, int64_t q_stride, const KvLayer& kv,
            const float* sinks, float* output, int64_t output_stride, float* scratch,
            int64_t thread)
      : plan_(plan),
        q_(q),
        q_stride_(q_stride),
        kv_(kv),
        sinks_(sinks),
        output_(output),
        output_stride_(output_stride),
        share_memory_(scratch + plan.num_threads_ * plan.floats_per_thread()),
        thread_scratch_({scratch + thread * plan.floats_per_thread(), plan.shape_}) {}

  void compute_share(int64_t share) const {
    plan_.for_each_tile(share,
                        [&](int64_t tile, Range splits) { compute_tile(share, tile, splits); });
  }

  // Merge the partial results of later shares into the tile that this share starts and they end.
  void merge_share(int64_t share) const {
    const int64_t tile = plan_.spanning_tile(share);
    if (tile < 0) return;
    const SplitKvAttention kernel = kernel_for(tile);
    const SplitResult running = share_scratch(share).running();
    for (int64_t later = share + 1; later < plan_.num_shares_; ++later) {
      const Range splits = plan_.splits_of(later, tile);
      for (int64_t split = splits.begin; split < splits.end; ++split) {
        kernel.merge(split, running, share_scratch(later).partial(split - splits.begin));
      }
    }
    kernel.write(running, sinks_, output_, output_stride_);
  }

 private:
  const AttentionPlan& plan_;
  const float* q_;  // [num_tokens, num_heads, head_dim]
  int64_t q_stride_;
  const KvLayer& kv_;
  const float* sinks_;  // [num_heads], or null
  float* output_;  // [num_tokens, num_heads, value_dim]
  int64_t output_stride_;
  float* share_memory_;  // [num_shares, floats_per_share]
  ThreadScratch thread_scratch_;

  ShareScratch share_scratch(int64_t share) const {
    return {share_memory_ + share * plan_.floats_per_share(), plan_.shape_};
  }

  SplitKvAttention kernel_for(int64_t tile) const {
    return SplitKvAttention(plan_.batch_, plan_.shape_, plan_.visibility_, kv_, plan_.tiles_[tile],
                            thread_scratch_.scratch());
  }

  // Compute the share's splits of one tile; write the output where they are all of the tile's.
  void compute_tile(int64_t share, int64_t tile, Range splits) const {
    const ShareScratch memory = share_scratch(share);
    const SplitKvAttention kernel = kernel_for(tile);
    kernel.load_queries(q_, q_stride_);
    for (int64_t split = splits.begin; split < splits.end; ++split) {
      const SplitKv own = kernel.locate_kv(split);
      const SplitKv next = kv_after(share, tile, split, own);
      if (splits.begin > 0) {
        kernel.compute(split, own, next, memory.partial(split - splits.begin));
      } else {
        kernel.compute(split, own, next, thread_scratch_.split_result());
        kernel.merge(split, memory.running(), thread_scratch_.split_result());
      }
    }
    if (splits.begin == 0 && splits.end == plan_.tiles_[tile].num_splits) {
      kernel.write(memory.running(), sinks_, output_, output_stride_);
    }
  }

  // Return the KV that the share reads after a split, for prefetching; the split itself where it
  // reads nothing more, or where KV is gathered into scratch memory.
  SplitKv kv_after(int64_t share, int64_t tile, int64_t split, const SplitKv& own) const {
    if (kv_.block_size % kLanes) return own;
    if (split + 1 < plan_.splits_of(share, tile).end) {
      return kernel_for(tile).locate_kv(split + 1);
    }
    const Range splits = plan_.splits_of(share, tile + 1);
    return splits.begin < splits.end ? kernel_for(tile + 1).locate_kv(splits.begin) : own;
  }
};

void AttentionPlan::attend(const float* q, int64_t q_stride, const KvLayer& kv,
                           const float* sinks, float* output, int64_t output_stride,
                           float* scratch, ThreadTeam team) const {
  const Execution execution(*this, q, q_stride, kv, sinks, output, output_stride, scratch,
                            team.index);
  team.parallel_for(num_shares_, [&](int64_t share) { execution.compute_share(share); });
  if (has_spanning_tile()) {
    team.parallel_for(num_shares_, [&](int64_t share) { execution.merge_share(share); });
  }
}

}  // namespace specdec
