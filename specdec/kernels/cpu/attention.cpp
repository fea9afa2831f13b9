#include "attention.h"

#include "segment.h"

namespace specdec {

namespace {

// One thread's memory: its scratch, and one segment's result.
struct ThreadMemory {
  float* begin;
  AttentionShape shape;

  SegmentScratch scratch() const { return SegmentScratch(begin, shape); }
  SegmentResult one() const { return SegmentResult(begin + SegmentScratch::floats(shape), shape); }
};

// One share's memory: a running result, and those of segments that are kept apart.
struct ShareMemory {
  float* begin;
  AttentionShape shape;

  SegmentResult total() const { return result(0); }
  SegmentResult apart(int64_t index) const { return result(1 + index); }

 private:
  SegmentResult result(int64_t index) const {
    return SegmentResult(begin + index * SegmentResult::floats(shape), shape);
  }
};

}  // namespace

int64_t AttentionPlan::floats_per_thread() const {
  return SegmentScratch::floats(shape_) + SegmentResult::floats(shape_);
}

int64_t AttentionPlan::floats_per_share() const {
  return (1 + most_apart_) * SegmentResult::floats(shape_);
}

void AttentionPlan::attend(const float* q, int64_t q_stride, const KvLayer& kv, float* output,
                           int64_t output_stride, float* scratch, Team team) const {
  const ThreadMemory own_memory = {scratch + team.index * floats_per_thread(), shape_};
  float* const shares = scratch + num_threads_ * floats_per_thread();
  const auto memory_of = [&](int64_t share) {
    return ShareMemory{shares + share * floats_per_share(), shape_};
  };
  const auto kernel_of = [&](int64_t chain) {
    return SegmentKernel(batch_, shape_, window_, kv, chains_[chain], own_memory.scratch());
  };
  // What a share reads after a segment; the segment itself where it reads no more, or only copies.
  const auto kv_after = [&](int64_t share, int64_t chain, int64_t segment, const SegmentKv& own) {
    if (kv.block_size % kLanes) return own;
    if (segment + 1 < segments_of(share, chain).end) {
      return kernel_of(chain).locate(segment + 1);
    }
    const Range segments = segments_of(share, chain + 1);
    return segments.begin < segments.end ? kernel_of(chain + 1).locate(segments.begin) : own;
  };
  const auto compute = [&](int64_t share) {
    const ShareMemory memory = memory_of(share);
    each_piece(share, [&](int64_t chain, Range segments) {
      const SegmentKernel kernel = kernel_of(chain);
      kernel.load_queries(q, q_stride);
      for (int64_t segment = segments.begin; segment < segments.end; ++segment) {
        const SegmentKv own = kernel.locate(segment);
        const SegmentKv next = kv_after(share, chain, segment, own);
        if (segments.begin > 0) {
          kernel.compute(segment, own, next, memory.apart(segment - segments.begin));
        } else {
          kernel.compute(segment, own, next, own_memory.one());
          kernel.merge(segment, memory.total(), own_memory.one());
        }
      }
      if (segments.begin == 0 && segments.end == chains_[chain].num_segments) {
        kernel.write(memory.total(), output, output_stride);
      }
    });
  };
  const auto complete = [&](int64_t share) {
    const int64_t chain = left_open(share);
    if (chain < 0) return;
    const SegmentKernel kernel = kernel_of(chain);
    for (int64_t later = share + 1; later < num_shares_; ++later) {
      const Range segments = segments_of(later, chain);
      for (int64_t segment = segments.begin; segment < segments.end; ++segment) {
        kernel.merge(segment, memory_of(share).total(),
                     memory_of(later).apart(segment - segments.begin));
      }
    }
    kernel.write(memory_of(share).total(), output, output_stride);
  };
  team.for_each(num_shares_, compute);
  if (is_divided()) team.for_each(num_shares_, complete);
}

}  // namespace specdec
