// Causal attention of many rows over the pages of their sequences. A block has up to ROWS rows of one KV head: the query heads
// that read it, token after token. It walks over the pages of the sequence, sealed or bf16 as each row reads them, with one
// page ahead on its way to shared memory.
//
// A bf16 page is in the order of matrix operands already (`page_order.rs`): a lane finds eight channels of a key side by side,
// so the channels that one instruction multiplies are 8 t + 4 s + {0, 1, 2, 3} of every 32, and queries are put in that order.
// Sealed pages are decoded to the same order in shared memory.

constexpr int WARPS = 8, THREADS = 32 * WARPS, ROWS = 16 * WARPS;
constexpr int CHUNKS = HEAD_DIM / 32;
constexpr int PAGE_BYTES = 64 / EXACT_TILE_TOKENS * EXACT_TILE_BYTES;
// Queries in two bf16 parts, x = high + low, so that logits lose nothing against f32; where registers have room.
constexpr int PARTS = HEAD_DIM <= 128 ? 2 : 1;

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
  const int* ends;       // [row]: positions from `sink` up to here are history, which is read from sealed pages
  long long query_stride, out_stride, sealed_stride;
  int exact_slots, all_layers, layer, kv_heads, group;
  int sink;     // a multiple of a page
  float scale;  // of logits, times log2(e)
};

DEVICE void multiply_add(float (&sum)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
// Two numbers as bf16, the first in the low half.
DEVICE u32 two_halves(float low, float high) {
  u32 word;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
  return word;
}
DEVICE float low_half(u32 word) { return __uint_as_float(word << 16); }
DEVICE float high_half(u32 word) { return __uint_as_float(word & 0xffff0000u); }

#if SEALED_BITS == 2 || SEALED_BITS == 4
constexpr int TILE_TOKENS = SEALED_TILE_TOKENS, RUN = TILE_TOKENS / 4;
constexpr u32 CODE = (1u << SEALED_BITS) - 1;

DEVICE int code_shift(int half, int part) { return SEALED_BITS == 4 ? 4 * part : 2 * (half + 2 * part); }
// Codes of four neighbours, one in each byte of a word.
DEVICE float code_of(u32 word, int byte) { return (float)(word >> 8 * byte & CODE); }

struct TokenPlace {
  const u8* tile;
  int run_token, column, eight, row;
  DEVICE TokenPlace(const u8* page, int token) {
    tile = page + token / TILE_TOKENS * SEALED_TILE_BYTES;
    run_token = token % TILE_TOKENS % RUN, column = token % TILE_TOKENS / RUN;
    eight = run_token / 4 * 2 + run_token % 2, row = 2 * column + run_token % 4 / 2;
  }
  // Scale and offset of a channel.
  DEVICE float2 scale(int side, int channel) const {
    const int group = channel / (HEAD_DIM / GROUPS);
    const u8* scales = tile + 2 * SEALED_SIDE_BYTES + side * SEALED_SCALE_BYTES;
    return scale_pair(__ldg((const u32*)(scales + group * TILE_TOKENS * 4 + eight / 4 * 128 + row * 16 + eight % 4 * 4)));
  }
};

#if BAND_UNITS
// Eight channels of a key in bands, from a multiple of eight on: they are in one band.
DEVICE uint4 decoded_key(const u8* page, int token, int channel) {
  const TokenPlace place(page, token);
  const int unit = channel / 16;
  int band = 0;
  #pragma unroll
  for (int i = 1; i < BANDS; i++) band += unit >= band_unit(i);
  const int bits = band_bits(band);
  const u32 code = place.tile[2 * SEALED_SIDE_BYTES + place.eight / 4 * 128 + place.row * 16 + place.eight % 4 * 4 + band];
  const float scale = code == 0 ? 0.0f : exp2_fast(code * (1.0f / 16.0f) - OCTAVES_BELOW);
  const float middle = -0.5f * (float)((1 << bits) - 1) * scale;
  const int flat = place.eight * TOKEN_BITS + band_bit(band) + (unit - band_unit(band)) * bits;
  const u8* at = place.tile + flat / 32 * 512 + (place.row * 4 + channel % 16 / 4) * 16 + flat / 8 % 4 * 4;
  const u32 mask = ((1u << bits) - 1) * 0x01010101u;
  u32 pairs[4];
  #pragma unroll
  for (int i = 0; i < 2; i++) {
    const u32 codes = __ldg((const u32*)(at + i * 16)) >> flat % 8 & mask;
    #pragma unroll
    for (int j = 0; j < 2; j++)
      pairs[2 * i + j] = two_halves(
          fmaf(scale, (float)(codes >> 16 * j & 255), middle), fmaf(scale, (float)(codes >> (16 * j + 8) & 255), middle));
  }
  return make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
}
#else
// Eight channels of a key, from a multiple of eight on.
DEVICE uint4 decoded_key(const u8* page, int token, int channel) {
  const TokenPlace place(page, token);
  const float2 scale = place.scale(0, channel);
  const int flat = place.eight * CHUNKS + channel / 32, inner = channel % 32;
  const int word = flat * SEALED_BITS / 4, shift = code_shift(flat % (4 / SEALED_BITS), inner / 16);
  const u8* at = place.tile + word / 4 * 512 + (place.row * 4 + inner % 16 / 4) * 16 + word % 4 * 4;
  u32 pairs[4];
  #pragma unroll
  for (int i = 0; i < 2; i++) {
    const u32 codes = __ldg((const u32*)(at + i * 16)) >> shift;
    #pragma unroll
    for (int j = 0; j < 2; j++)
      pairs[2 * i + j] = two_halves(
          fmaf(scale.x, code_of(codes, 2 * j), -scale.y), fmaf(scale.x, code_of(codes, 2 * j + 1), -scale.y));
  }
  return make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
}

#endif

// Channels c, c + 8, c + 16, c + 24 of the values of two neighbouring tokens, the first of which is even.
DEVICE uint4 decoded_values(const u8* page, int token, int channel) {
  const TokenPlace first(page, token), second(page, token + 1);
  const float2 scales[2] = {first.scale(1, channel), second.scale(1, channel)};
  u32 pairs[4];
  #pragma unroll
  for (int i = 0; i < 4; i++) {
    const int eight = channel / 8 + i;
    const int word = eight * SEALED_BITS / 4 * (TILE_TOKENS / 32) + first.run_token / 8;
    const int shift = code_shift(eight % (4 / SEALED_BITS), first.run_token % 8 / 4);
    const u8* at = first.tile + SEALED_SIDE_BYTES + word / 4 * 512 + (channel % 8 * 4 + first.column) * 16 + word % 4 * 4;
    const u32 codes = __ldg((const u32*)at) >> shift;
    pairs[i] = two_halves(
        fmaf(scales[0].x, code_of(codes, first.run_token % 4), -scales[0].y),
        fmaf(scales[1].x, code_of(codes, second.run_token % 4), -scales[1].y));
  }
  return make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
}
#endif

#if SEALED_BITS == 8
// A number of E4M3, widened to f16 with a shift, which makes it 2^8 times too small.
DEVICE float wide(u32 byte) {
  float x;
  asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"((unsigned short)((byte & 0x7fu) << 7 | (byte & 0x80u) << 8)));
  return x * 256.0f;
}
DEVICE float scale_of(const u8* page, int side, int token) {
  const u8* scales = page + token / 16 * SEALED_TILE_BYTES + 2 * SEALED_SIDE_BYTES + side * SEALED_SCALE_BYTES;
  float x;
  asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(*(const unsigned short*)(scales + token % 16 * 2)));
  return x;
}

DEVICE uint4 decoded_key(const u8* page, int token, int channel) {
  const float scale = scale_of(page, 0, token);
  const int word = token % 16 / 8 * (HEAD_DIM / 16) + channel / 16;
  const u8* at = page + token / 16 * SEALED_TILE_BYTES + word / 4 * 512 + (token % 8 * 4 + channel % 16 / 4) * 16 + word % 4 * 4;
  u32 pairs[4];
  #pragma unroll
  for (int i = 0; i < 2; i++) {
    const u32 four = __ldg((const u32*)(at + i * 16));
    #pragma unroll
    for (int j = 0; j < 2; j++)
      pairs[2 * i + j] = two_halves(scale * wide(four >> 16 * j & 255), scale * wide(four >> (16 * j + 8) & 255));
  }
  return make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
}

DEVICE uint4 decoded_values(const u8* page, int token, int channel) {
  const float scales[2] = {scale_of(page, 1, token), scale_of(page, 1, token + 1)};
  u32 pairs[4];
  #pragma unroll
  for (int i = 0; i < 4; i++) {
    const int word = channel / 8 + i;
    const u8* at = page + token / 16 * SEALED_TILE_BYTES + SEALED_SIDE_BYTES + word / 4 * 512
        + (channel % 8 * 4 + token % 8 / 2) * 16 + word % 4 * 4 + token % 16 / 8;
    pairs[i] = two_halves(scales[0] * wide(at[0]), scales[1] * wide(at[2]));
  }
  return make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
}
#endif

#if SEALED_BITS
constexpr int SEALED_PAGE_BYTES = 64 / SEALED_TILE_TOKENS * SEALED_TILE_BYTES;

// A sealed page as a bf16 page.
DEVICE void decode_page(const u8* page, u8* out) {
  constexpr int SIDE_UNITS = EXACT_SIDE_BYTES / 16;
  for (int unit = threadIdx.x; unit < 8 * SIDE_UNITS; unit += THREADS) {
    const int tile = unit / SIDE_UNITS, inside = unit % SIDE_UNITS, chunk = inside / 32, lane = inside % 32;
    u8* at = out + tile * EXACT_TILE_BYTES + inside * 16;
    *(uint4*)at = decoded_key(page, tile * 8 + lane / 4, chunk * 32 + lane % 4 * 8);
    *(uint4*)(at + EXACT_SIDE_BYTES) = decoded_values(page, tile * 8 + lane % 4 * 2, chunk * 32 + lane / 4);
  }
}
#endif

// One page of one kind on its way through the pages that the rows of a block read.
struct Turn {
  int page;
  bool sealed;
};

struct Walk {
  int last_page, sink, least_end, most_end;  // positions but for the page
  // What comes after a turn: a page that some rows read sealed and others, or other tokens, in bf16 has two.
  DEVICE Turn next(Turn turn) const {
    if (turn.sealed && turn.page * 64 + 64 > least_end) return {turn.page, false};
    return first(turn.page + 1);
  }
  DEVICE Turn first(int page) const { return {page, page * 64 >= sink && page * 64 < most_end}; }
  DEVICE bool ends(Turn turn) const { return turn.page > last_page; }
};

DEVICE void fetch(const Arguments& a, const Item& item, Turn turn, u8* to) {
#if SEALED_BITS
  if (turn.sealed) {
    const u32 slot = a.tables[item.table + item.pages + turn.page];
    decode_page(a.sealed + (long long)slot * a.sealed_stride + (long long)blockIdx.y * SEALED_PAGE_BYTES, to);
    return;
  }
#endif
  const int slot = a.tables[item.table + turn.page];
  // Without a format of sealed pages, history comes from bf16 pages of another pool, in the same slots.
  const u8* page = turn.sealed ? a.sealed + slot * a.sealed_stride + (long long)blockIdx.y * PAGE_BYTES
      : slot < a.exact_slots
      ? a.exact + (((long long)slot * a.all_layers + a.layer) * a.kv_heads + blockIdx.y) * PAGE_BYTES
      : a.scratch + ((long long)(slot - a.exact_slots) * a.kv_heads + blockIdx.y) * PAGE_BYTES;
  const u32 target = (u32)__cvta_generic_to_shared(to);
  for (int at = threadIdx.x * 16; at < PAGE_BYTES; at += THREADS * 16)
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" :: "r"(target + at), "l"(page + at) : "memory");
}

// The queries of a lane: rows g and g + 8 of its warp.
struct Queries {
  u32 parts[PARTS][CHUNKS][2][4];
  DEVICE void load(const float* const (&rows)[2], int lane) {
    #pragma unroll
    for (int chunk = 0; chunk < CHUNKS; chunk++)
      #pragma unroll
      for (int step = 0; step < 2; step++)
        #pragma unroll
        for (int i = 0; i < 2; i++) {
          const int channel = chunk * 32 + lane % 4 * 8 + step * 4;
          const float4 x = rows[i] ? *(const float4*)(rows[i] + channel) : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
          const u32 first = two_halves(x.x, x.y), second = two_halves(x.z, x.w);
          parts[0][chunk][step][i] = first, parts[0][chunk][step][2 + i] = second;
          if (PARTS == 2) {
            parts[PARTS - 1][chunk][step][i] = two_halves(x.x - low_half(first), x.y - high_half(first));
            parts[PARTS - 1][chunk][step][2 + i] = two_halves(x.z - low_half(second), x.w - high_half(second));
          }
        }
  }
};

extern "C" __global__ void __launch_bounds__(THREADS, 1) attend_rows(const __grid_constant__ Arguments a) {
  extern __shared__ __align__(128) u8 memory[];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const Item item = a.items[blockIdx.x];
  // Rows g and g + 8 of the warp: query row, position, and where its history ends.
  const float* sources[2];
  float* targets[2];
  int positions[2], ends[2];
  #pragma unroll
  for (int i = 0; i < 2; i++) {
    const int row = warp * 16 + lane / 4 + 8 * i, token = row / a.group, head = blockIdx.y * a.group + row % a.group;
    const bool there = token < item.tokens;
    const long long batch_row = item.first_row + token;
    sources[i] = there ? a.queries + batch_row * a.query_stride + head * HEAD_DIM : nullptr;
    targets[i] = there ? a.out + batch_row * a.out_stride + head * HEAD_DIM : nullptr;
    positions[i] = there ? item.first_position + token : -1;
    ends[i] = there ? a.ends[batch_row] : 0;
  }
  const int last_position = item.first_position + item.tokens - 1;
  Walk walk;
  walk.last_page = last_position / 64;
  walk.sink = a.sink;
  walk.least_end = item.least_end;
  walk.most_end = item.most_end;
  Queries queries;
  queries.load(sources, lane);
  float out[HEAD_DIM / 8][4] = {};
  float largest[2] = {-1e30f, -1e30f}, total[2] = {0.0f, 0.0f};

  Turn turn = walk.first(0);
  int stage = 0;
  fetch(a, item, turn, memory);
  #pragma unroll 1
  while (!walk.ends(turn)) {
    asm volatile("cp.async.wait_all;" ::: "memory");
    __syncthreads();
    const u8* page = memory + stage * PAGE_BYTES;
    const Turn next = walk.next(turn);
    stage ^= 1;
    if (!walk.ends(next)) fetch(a, item, next, memory + stage * PAGE_BYTES);

    float logits[8][4] = {};
    #pragma unroll
    for (int tile = 0; tile < 8; tile++)
      #pragma unroll
      for (int chunk = 0; chunk < CHUNKS; chunk++) {
        const uint4 key = *(const uint4*)(page + tile * EXACT_TILE_BYTES + chunk * 512 + lane * 16);
        #pragma unroll
        for (int part = 0; part < PARTS; part++) {
          multiply_add(logits[tile], queries.parts[part][chunk][0], key.x, key.y);
          multiply_add(logits[tile], queries.parts[part][chunk][1], key.z, key.w);
        }
      }
    // Of history a row sees what lies before its end, of the rest what lies from there on, up to its own token.
    const int first = turn.page * 64;
    #pragma unroll
    for (int i = 0; i < 2; i++) {
      const bool history = first >= walk.sink;
      const int begin = turn.sealed || !history ? 0 : ends[i] - first;
      const int end = turn.sealed ? ends[i] - first : positions[i] - first + 1;
      float most = largest[i];
      #pragma unroll
      for (int tile = 0; tile < 8; tile++)
        #pragma unroll
        for (int j = 0; j < 2; j++) {
          float& logit = logits[tile][2 * i + j];
          const int key = tile * 8 + lane % 4 * 2 + j;
          logit = key >= begin && key < end ? logit * a.scale : NEGATIVE_INFINITY;
          most = fmaxf(most, logit);
        }
      most = quad_max(most);
      const float rescale = exp2_fast(largest[i] - most);
      largest[i] = most;
      float sum = 0.0f;
      #pragma unroll
      for (int tile = 0; tile < 8; tile++)
        #pragma unroll
        for (int j = 0; j < 2; j++) {
          float& weight = logits[tile][2 * i + j];
          weight = exp2_fast(weight - most);
          sum += weight;
        }
      total[i] = fmaf(total[i], rescale, sum);
      #pragma unroll
      for (int channel = 0; channel < HEAD_DIM / 8; channel++)
        #pragma unroll
        for (int j = 0; j < 2; j++) out[channel][2 * i + j] *= rescale;
    }
    #pragma unroll
    for (int pair = 0; pair < 4; pair++) {
      const u32 weights[4] = {
          two_halves(logits[2 * pair][0], logits[2 * pair][1]), two_halves(logits[2 * pair][2], logits[2 * pair][3]),
          two_halves(logits[2 * pair + 1][0], logits[2 * pair + 1][1]), two_halves(logits[2 * pair + 1][2], logits[2 * pair + 1][3])};
      const u8* values = page + 2 * pair * EXACT_TILE_BYTES + EXACT_SIDE_BYTES + lane * 16;
      #pragma unroll
      for (int chunk = 0; chunk < CHUNKS; chunk++) {
        const uint4 low = *(const uint4*)(values + chunk * 512), high = *(const uint4*)(values + EXACT_TILE_BYTES + chunk * 512);
        multiply_add(out[4 * chunk], weights, low.x, high.x);
        multiply_add(out[4 * chunk + 1], weights, low.y, high.y);
        multiply_add(out[4 * chunk + 2], weights, low.z, high.z);
        multiply_add(out[4 * chunk + 3], weights, low.w, high.w);
      }
    }
    __syncthreads();
    turn = next;
  }
  #pragma unroll
  for (int i = 0; i < 2; i++) {
    const float inverse = 1.0f / quad_sum(total[i]);
    if (!targets[i]) continue;
    #pragma unroll
    for (int channel = 0; channel < HEAD_DIM / 8; channel++)
      *(float2*)(targets[i] + channel * 8 + lane % 4 * 2) =
          make_float2(out[channel][2 * i] * inverse, out[channel][2 * i + 1] * inverse);
  }
}
