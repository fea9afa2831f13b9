// Input of one forward pass: a flat batch of tokens over a paged KV cache
// (`specdec/kernels/reference/forward_batch.py`).
#pragma once

#include <cstdint>

namespace specdec {

struct AdapterRun;  // in lora.h
struct StatePool;   // in states.h

// Sequence i owns tokens query_starts[i] to query_starts[i + 1], the last of its context_lens[i]
// tokens. block_tables[i] lists the KV blocks of the sequence in order.
//
// The last tokens of a sequence may be a tree of drafts (`specdec/types/drafts/draft_tree.py`): then KV
// slots are consecutive still, but a node's position is that of the base and its depth. A tree may
// have more nodes than the sequence has tokens here: the KV of the first ones exists.
struct Batch {
  int64_t num_tokens, num_sequences, block_size;
  const int32_t* input_ids;            // [num_tokens]
  const int32_t* query_starts;         // [num_sequences + 1]
  const int32_t* context_lens;         // [num_sequences]
  const int32_t* const* block_tables;  // [num_sequences]
  const int32_t* num_nodes = nullptr;  // [num_sequences], 0 for a chain; null without trees
  // [num_tokens], the nodes on the path to a node as bits, itself included; 0 for other tokens; null
  // without trees
  const uint64_t* ancestors = nullptr;
  // In order and without overlaps; tokens outside of all runs have no adapter.
  const AdapterRun* adapter_runs = nullptr;  // [num_adapter_runs]
  int64_t num_adapter_runs = 0;
  const StatePool* states = nullptr;  // of recurrent layers; null without any

  int64_t num_nodes_of(int64_t sequence) const { return num_nodes ? num_nodes[sequence] : 0; }

  // Return the position of the last token that is no node.
  int64_t base_of(int64_t sequence) const {
    return context_lens[sequence] - num_nodes_of(sequence) - 1;
  }

  // Return the number of nodes on the path to a token, itself included.
  int64_t depth_of(int64_t token) const {
    return ancestors ? __builtin_popcountll(ancestors[token]) : 0;
  }

  // Return the slot of the KV at an index of a sequence.
  int64_t slot(int64_t sequence, int64_t index) const {
    const int64_t block = block_tables[sequence][index / block_size];
    return block * block_size + index % block_size;
  }
};

}  // namespace specdec
