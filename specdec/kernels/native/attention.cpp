#include "attention.h"

#include "segment.h"

namespace specdec {

namespace {

// One share's memory: its own scratch, a running result, one segment's, and those kept apart.
struct ShareMemory {
  float* begin;
  AttentionShape shape;

  SegmentScratch scratch() const { return SegmentScratch(begin, shape); }
  SegmentResult total() const { return result(0); }
  SegmentResult one() const { return result(1); }
  SegmentResult apart(int64_t index) const { return result(2 + index); }

 private:
  SegmentResult result(int64_t index) const {
    const int64_t offset = SegmentScratch::floats(shape) + index * SegmentResult::floats(shape);
    return SegmentResult(begin + offset, shape);
  }
};

}  // namespace

int64_t AttentionPlan::floats_per_share() const {
  return SegmentScratch::floats(shape_) + (2 + most_apart_) * SegmentResult::floats(shape_);
}

void AttentionPlan::attend(const float* q, int64_t q_stride, const KvLayer& kv, float* output,
                           int64_t output_stride, float* scratch, Team team) const {
  const auto memory_of = [&](int64_t share) {
    return ShareMemory{scratch + share * floats_per_share(), shape_};
  };
  const auto kernel_of = [&](int64_t chain, int64_t share) {
    return SegmentKernel(batch_, shape_, window_, kv, chains_[chain], memory_of(share).scratch());
  };
  // What a share reads after a segment; the segment itself where it reads no more, or only copies.
  const auto kv_after = [&](int64_t share, int64_t chain, int64_t segment, const SegmentKv& own) {
    if (kv.block_size % kLanes) return own;
    if (segment + 1 < segments_of(share, chain).end) {
      return kernel_of(chain, share).locate(segment + 1);
    }
    const Range segments = segments_of(share, chain + 1);
    return segments.begin < segments.end ? kernel_of(chain + 1, share).locate(segments.begin) : own;
  };
  const auto compute = [&](int64_t share) {
    const ShareMemory memory = memory_of(share);
    each_piece(share, [&](int64_t chain, Range segments) {
      const SegmentKernel kernel = kernel_of(chain, share);
      kernel.load_queries(q, q_stride);
      for (int64_t segment = segments.begin; segment < segments.end; ++segment) {
        const SegmentKv own = kernel.locate(segment);
        const SegmentKv next = kv_after(share, chain, segment, own);
        if (segments.begin > 0) {
          kernel.compute(segment, own, next, memory.apart(segment - segments.begin));
        } else {
          kernel.compute(segment, own, next, memory.one());
          kernel.merge(segment, memory.total(), memory.one());
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
    const SegmentKernel kernel = kernel_of(chain, share);
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
  team.for_each(num_shares_, complete);
}

}  // namespace specdec
