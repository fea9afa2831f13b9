#include "attention.h"

#include "split_kv_attention.h"

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

void AttentionPlan::attend(const float* q, int64_t q_stride, const KvLayer& kv, float* output,
                           int64_t output_stride, float* scratch, ThreadTeam team) const {
  const ThreadScratch thread_scratch = {scratch + team.index * floats_per_thread(), shape_};
  float* const share_memory = scratch + num_threads_ * floats_per_thread();
  const auto share_scratch = [&](int64_t share) {
    return ShareScratch{share_memory + share * floats_per_share(), shape_};
  };
  const auto kernel_for = [&](int64_t tile) {
    return SplitKvAttention(batch_, shape_, window_, kv, tiles_[tile], thread_scratch.scratch());
  };
  // Return the KV that the share reads after a split, for prefetching; the split itself where it
  // reads nothing more, or where KV is gathered into scratch memory.
  const auto kv_after = [&](int64_t share, int64_t tile, int64_t split, const SplitKv& own) {
    if (kv.block_size % kLanes) return own;
    if (split + 1 < splits_of(share, tile).end) {
      return kernel_for(tile).locate_kv(split + 1);
    }
    const Range splits = splits_of(share, tile + 1);
    return splits.begin < splits.end ? kernel_for(tile + 1).locate_kv(splits.begin) : own;
  };
  const auto compute_share = [&](int64_t share) {
    const ShareScratch memory = share_scratch(share);
    for_each_tile(share, [&](int64_t tile, Range splits) {
      const SplitKvAttention kernel = kernel_for(tile);
      kernel.load_queries(q, q_stride);
      for (int64_t split = splits.begin; split < splits.end; ++split) {
        const SplitKv own = kernel.locate_kv(split);
        const SplitKv next = kv_after(share, tile, split, own);
        if (splits.begin > 0) {
          kernel.compute(split, own, next, memory.partial(split - splits.begin));
        } else {
          kernel.compute(split, own, next, thread_scratch.split_result());
          kernel.merge(split, memory.running(), thread_scratch.split_result());
        }
      }
      if (splits.begin == 0 && splits.end == tiles_[tile].num_splits) {
        kernel.write(memory.running(), output, output_stride);
      }
    });
  };
  const auto reduce_share = [&](int64_t share) {
    const int64_t tile = spanning_tile(share);
    if (tile < 0) return;
    const SplitKvAttention kernel = kernel_for(tile);
    for (int64_t later = share + 1; later < num_shares_; ++later) {
      const Range splits = splits_of(later, tile);
      for (int64_t split = splits.begin; split < splits.end; ++split) {
        kernel.merge(split, share_scratch(share).running(),
                     share_scratch(later).partial(split - splits.begin));
      }
    }
    kernel.write(share_scratch(share).running(), output, output_stride);
  };
  team.parallel_for(num_shares_, compute_share);
  if (has_spanning_tile()) team.parallel_for(num_shares_, reduce_share);
}

}  // namespace specdec
