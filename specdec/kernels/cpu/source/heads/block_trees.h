// Draft trees after the sequences of a batch, by draft blocks with a Markov head.
#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>
#include <vector>

#include "heads/block_pass.h"
#include "heads/drafts.h"
#include "heads/markov_run.h"
#include "heads/path_tree.h"

namespace specdec {

// All threads of a team call `run`. One rank holds the head.
class BlockTrees {
 public:
  // memory: null to count the bytes only.
  BlockTrees(const BlockHead& head, const Batch& pairs, KvCache cache, DraftTrees wanted,
             void* memory, int num_threads)
      : head_(head), wanted_(wanted), arena_(memory) {
    const auto sequences = wanted.drafts.drafting(pairs.num_sequences);
    num_blocks_ = sequences.size();
    const int64_t num_slots = wanted.max_depth * num_blocks_, size = head.decoder.hidden_size;
    int64_t max_rows = 0;
    for (const int64_t sequence : sequences) {
      trees_.emplace_back(wanted.drafts.counts[sequence], wanted.depths[sequence]);
      max_rows += trees_.back().num_parents();
    }
    children_.resize(max_rows);
    outputs_ = arena_.allocate_floats(num_slots * size);
    logits_ = arena_.allocate_floats(num_slots * num_tokens());
    row_outputs_ = arena_.allocate_floats(max_rows * size);
    row_logits_ = arena_.allocate_floats(max_rows * num_tokens());
    matrix_scratch_ = arena_.allocate(scratch_bytes(head.lm_head, num_slots));
    markov_.emplace(head.markov, size, nullptr, max_rows, arena_);
    pass_.emplace(head, pairs, cache, sequences, wanted.max_depth, arena_.rest(), num_threads);
  }

  int64_t memory_bytes() const { return arena_.used() + pass_->memory_bytes(); }
  bool has_failed() const { return pass_->has_failed(); }

  // Write the KV of the context, and draft. features: [num_pairs, hidden_size].
  void run(const float* features, ThreadTeam team) {
    pass_->run(features, outputs_, team);
    if (pass_->has_failed()) return;
    const int64_t num_slots = wanted_.max_depth * num_blocks_;
    const Activations slots = {outputs_, head_.decoder.hidden_size, num_slots, matrix_scratch_};
    quantize_rows(head_.lm_head, slots, team);
    gemm(head_.lm_head, slots, logits_, num_tokens(), Store::kOverwrite, team);
    for (int64_t level = 0; level < wanted_.max_depth; ++level) {
      team.barrier();  // until all threads have done with the rows of the level before
      team.parallel_for(1, [&](int64_t) { begin_level(); });
      if (blocks_.empty()) break;
      grow(level, team);
    }
    team.parallel_for(num_blocks_, [&](int64_t block) { write_tree(block); });
  }

 private:
  const BlockHead& head_;
  DraftTrees wanted_;
  int64_t num_blocks_;
  Arena arena_;
  float* outputs_;      // [max_depth, num_blocks, hidden_size]
  float* logits_;       // [max_depth, num_blocks, num_tokens], without the bias
  float* row_outputs_;  // [max_rows, hidden_size]
  float* row_logits_;   // [max_rows, num_tokens]
  void* matrix_scratch_;
  std::optional<MarkovRun> markov_;
  std::optional<BlockPass> pass_;
  std::vector<PathTree> trees_;                                // [num_blocks]
  std::vector<std::vector<sampling::WeighedDraft>> children_;  // [max_rows]
  std::vector<int64_t> first_rows_;                            // of a level, [num_blocks]

  // Of the rows of a level, nodes whose children come next: blocks, tokens, rows of the parents.
  std::vector<int64_t> blocks_, parent_rows_;
  std::vector<int32_t> before_;

  int64_t num_tokens() const { return head_.lm_head.out_features; }
  int64_t sequence(int64_t block) const { return pass_->blocks().sequences()[block]; }

  // List the rows of a level.
  void begin_level() {
    const std::vector<int64_t> rows_before = first_rows_;
    blocks_.clear(), before_.clear(), parent_rows_.clear(), first_rows_.clear();
    for (int64_t block = 0; block < num_blocks_; ++block) {
      first_rows_.push_back(blocks_.size());
      for (const int64_t place : trees_[block].frontier()) {
        blocks_.push_back(block);
        if (place == kBase) {
          before_.push_back(pass_->blocks().anchor(block));
        } else {
          const TreeNode& node = trees_[block].nodes()[place];
          before_.push_back(node.token);
          parent_rows_.push_back(rows_before[block] + node.parent_row);
        }
      }
    }
    markov_->set_num_rows(blocks_.size());
  }

  // Find the children of the rows of a level, and add them to the trees.
  void grow(int64_t level, ThreadTeam team) {
    const int64_t num_rows = blocks_.size(), size = head_.decoder.hidden_size;
    if (level == 0) {
      markov_->begin(team);
    } else {
      markov_->follow(parent_rows_.data(), team);
    }
    team.parallel_for(num_rows, [&](int64_t row) {
      const int64_t slot = level * num_blocks_ + blocks_[row];
      std::copy_n(outputs_ + slot * size, size, row_outputs_ + row * size);
      std::copy_n(logits_ + slot * num_tokens(), num_tokens(), row_logits_ + row * num_tokens());
    });
    markov_->add_bias(before_.data(), row_outputs_, row_logits_, team);
    team.parallel_for(num_rows, [&](int64_t row) {
      static thread_local sampling::DraftSampler sampler;  // reuses its memory
      const int64_t block = blocks_[row];
      children_[row] = sampler.children(
          wanted_.drafts.params_of(sequence(block), level), row_logits_ + row * num_tokens(),
          head_.target_tokens, num_tokens(), trees_[block].num_ranks());
    });
    team.parallel_for(num_blocks_, [&](int64_t block) {
      if (trees_[block].frontier().empty()) return;
      const auto* own = &children_[first_rows_[block]];
      trees_[block].add_level([&](int64_t row) -> const auto& { return own[row]; });
    });
  }

  void write_tree(int64_t block) const {
    const int64_t first = sequence(block) * wanted_.drafts.max_count;
    const std::vector<TreeNode>& nodes = trees_[block].nodes();
    for (size_t place = 0; place < nodes.size(); ++place) {
      wanted_.drafts.tokens[first + place] = nodes[place].token;
      wanted_.parents[first + place] = static_cast<int32_t>(nodes[place].parent);
    }
  }
};

}  // namespace specdec
