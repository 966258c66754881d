// Causal attention of many rows over the pages of their sequences: what both kernels for it share. A block has up to ROWS rows
// of one KV head: the query heads that read it, token after token. It walks over the pages of the sequence, sealed or bf16 as
// each row reads them.

constexpr int ROWS = 128;
constexpr int PAGE_BYTES = PAGE_TOKENS / EXACT_TILE_TOKENS * EXACT_TILE_BYTES;

struct Item {
  int table;           // where the page tables of the sequence begin: bf16 slots, then as many sealed slots
  int pages;           // of the sequence
  int first_row;       // of the batch
  int first_position;  // of that row
  int tokens;          // rows here
  int least_end, most_end;  // of their histories
  int padding;
};

struct Arguments {
  const float* queries;  // [row][stride], head h at h * HEAD_DIM
  float* out;            // [row][query head][channel]
  const u8 *exact, *scratch, *sealed;
  const u32* tables;
  const Item* items;
  float* totals;         // [row][query head]: logarithm (base 2) of the sum of all weights, or null
  const int* ends;       // [row]: positions from `sink` up to here are history, which is read from sealed pages
  const u8* means;       // [page][KV head][channel]: what the stored keys of sealed pages are less of, in bf16, or null
  long long query_stride, out_stride, exact_stride, sealed_stride;
  int exact_slots;  // slots from here on are in `scratch`
  int group;
  int sink;     // a multiple of a page
  int window;   // a row sees itself and so many positions less one before it
  float scale;  // of logits, times log2(e)
};

// One page of one kind on its way through the pages that the rows of a block read.
struct Turn {
  int page;
  bool sealed;
};

struct Walk {
  int first_position, last_position, sink, window, least_end, most_end;
  DEVICE Walk(const Arguments& a, const Item& item)
      : first_position(item.first_position), last_position(item.first_position + item.tokens - 1), sink(a.sink),
        window(a.window), least_end(item.least_end), most_end(item.most_end) {}
  // The first page that a row sees something of.
  DEVICE Turn begin() const { return first(max(first_position - window + 1, 0) / PAGE_TOKENS); }
  // What comes after a turn: a page that some rows read sealed and others, or other tokens, in bf16 has two.
  DEVICE Turn next(Turn turn) const {
    if (turn.sealed && turn.page * PAGE_TOKENS + PAGE_TOKENS > least_end) return {turn.page, false};
    return first(turn.page + 1);
  }
  DEVICE Turn first(int page) const { return {page, page * PAGE_TOKENS >= sink && page * PAGE_TOKENS < most_end}; }
  DEVICE bool ends(Turn turn) const { return turn.page > last_position / PAGE_TOKENS; }
  // Whether all rows see all tokens of a turn.
  DEVICE bool seen_by_all(Turn turn) const {
    const int begin = turn.page * PAGE_TOKENS;
    if (turn.sealed) return begin + PAGE_TOKENS <= least_end;
    return begin + PAGE_TOKENS <= first_position + 1 && (begin < sink || begin >= most_end) && begin > last_position - window;
  }
};

// The place of a slot's page of this block's head. Without a format of sealed pages, history is bf16 too.
DEVICE u32 slot_of(const Arguments& a, const Item& item, Turn turn) {
  return a.tables[item.table + turn.page + (turn.sealed ? item.pages : 0)];
}
DEVICE const u8* page_of(const Arguments& a, Turn turn, u32 slot) {
#if SEALED_BITS
  constexpr int HISTORY_BYTES = PAGE_TOKENS / SEALED_TILE_TOKENS * SEALED_TILE_BYTES;
#else
  constexpr int HISTORY_BYTES = PAGE_BYTES;
#endif
  if (turn.sealed) return a.sealed + (long long)slot * a.sealed_stride + (long long)blockIdx.y * HISTORY_BYTES;
  if (slot < a.exact_slots) return a.exact + slot * a.exact_stride + (long long)blockIdx.y * PAGE_BYTES;
  return a.scratch + ((long long)(slot - a.exact_slots) * gridDim.y + blockIdx.y) * PAGE_BYTES;
}

// The mean key of a sealed page.
DEVICE const u8* mean_of(const Arguments& a, Turn turn) {
  return a.means ? a.means + ((long long)turn.page * gridDim.y + blockIdx.y) * (HEAD_DIM * 2) : nullptr;
}

// The two rows of a lane in the accumulator of a matrix product, eight rows apart.
struct TwoRows {
  const float* sources[2];  // queries; null where there is no row
  float* targets[2];
  int positions[2], ends[2];
  DEVICE TwoRows(const Arguments& a, const Item& item, int first) {
    #pragma unroll
    for (int i = 0; i < 2; i++) {
      const int row = first + 8 * i, token = row / a.group, head = blockIdx.y * a.group + row % a.group;
      const bool there = token < item.tokens;
      const long long batch_row = item.first_row + token;
      sources[i] = there ? a.queries + batch_row * a.query_stride + head * HEAD_DIM : nullptr;
      targets[i] = there ? a.out + batch_row * a.out_stride + head * HEAD_DIM : nullptr;
      positions[i] = there ? item.first_position + token : -1;
      ends[i] = there ? a.ends[batch_row] : 0;
    }
  }
};

// Softmax of two rows, page after page.
struct Softmax {
  float largest[2] = {-1e30f, -1e30f}, total[2] = {0.0f, 0.0f};

  // Logits of 64 tokens become weights; `rescale` is what sums of values so far are multiplied with. Of history a row sees
  // what lies before its end, of the rest what lies from there on, in its window and up to its own token.
  DEVICE void add(float (&logits)[8][4], float (&rescale)[2], const Walk& walk, Turn turn, const TwoRows& rows, float scale,
                  int lane) {
    if (!walk.seen_by_all(turn)) {
      const int first = turn.page * PAGE_TOKENS;
      #pragma unroll
      for (int i = 0; i < 2; i++) {
        const int from = turn.sealed || first < walk.sink ? 0 : rows.ends[i] - first;
        const int begin = max(from, rows.positions[i] - walk.window + 1 - first);
        const int end = turn.sealed ? rows.ends[i] - first : rows.positions[i] - first + 1;
        #pragma unroll
        for (int j = 0; j < 16; j++) {
          const int key = j / 2 * 8 + lane % 4 * 2 + j % 2;
          if (key < begin || key >= end) logits[j / 2][2 * i + j % 2] = NEGATIVE_INFINITY;
        }
      }
    }
    #pragma unroll
    for (int i = 0; i < 2; i++) {
      float most = largest[i];
      #pragma unroll
      for (int j = 0; j < 16; j++) most = fmaxf(most, logits[j / 2][2 * i + j % 2]);
      most = quad_max(most);
      rescale[i] = exp2_fast((largest[i] - most) * scale);
      largest[i] = most;
      const float reference = most * scale;
      float sums[2] = {0.0f, 0.0f};
      #pragma unroll
      for (int j = 0; j < 16; j++) {
        float& weight = logits[j / 2][2 * i + j % 2];
        weight = exp2_fast(fmaf(weight, scale, -reference));
        sums[j % 2] += weight;
      }
      total[i] = fmaf(total[i], rescale[i], sums[0] + sums[1]);
    }
  }
};

// Weights of 64 tokens as operands of products with values, sixteen tokens each.
DEVICE void as_operands(const float (&weights)[8][4], u32 (&operands)[4][4]) {
  #pragma unroll
  for (int pair = 0; pair < 4; pair++)
    #pragma unroll
    for (int i = 0; i < 4; i++)
      operands[pair][i] = two_halves(weights[2 * pair + i / 2][i % 2 * 2], weights[2 * pair + i / 2][i % 2 * 2 + 1]);
}

// Sums of values of two rows, divided by the sums of their weights.
DEVICE void store_rows(
    const Arguments& a, const float (&out)[HEAD_DIM / 8][4], const Softmax& softmax, const TwoRows& rows, int lane) {
  #pragma unroll
  for (int i = 0; i < 2; i++) {
    const float total = quad_sum(softmax.total[i]), inverse = 1.0f / total;
    if (!rows.targets[i]) continue;
    // Outputs lie side by side, so their place tells that of the total.
    if (a.totals && lane % 4 == 0)
      a.totals[(rows.targets[i] - a.out) / HEAD_DIM] = fmaf(softmax.largest[i], a.scale, __log2f(total));
    #pragma unroll
    for (int eight = 0; eight < HEAD_DIM / 8; eight++)
      *(float2*)(rows.targets[i] + eight * 8 + lane % 4 * 2) =
          make_float2(out[eight][2 * i] * inverse, out[eight][2 * i + 1] * inverse);
  }
}
