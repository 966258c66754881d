// One row of activations against codes with scales. The matrix instruction has eight columns for rows of activations; with one
// row they hold different groups of its inputs instead, each zero outside of its own group:
//
//   column        0        1        2     ..    7
//   tile 0     group 0  group 1     0     ..    0        so that a lane ends with sums of two groups for two output channels,
//   tile 1        0        0     group 0  ..    0        and scales are applied once for eight groups, by the lane that has
//   ..                                                   them, instead of once for each group by all.
//
// Results of all columns are added at the end of a row, so they are not bit for bit those that a batch gives.

// Reads two or four words if `there`; other lanes keep the zeros they have.
DEVICE void shared8_if(bool there, u32 address, u32& x, u32& y) {
  asm volatile("{.reg .pred there; setp.ne.u32 there, %3, 0; @there ld.shared.v2.u32 {%0,%1}, [%2];}"
               : "+r"(x), "+r"(y) : "r"(address), "r"((u32)there) : "memory");
}
DEVICE void shared16_if(bool there, u32 address, u32& x, u32& y, u32& z, u32& w) {
  asm volatile("{.reg .pred there; setp.ne.u32 there, %5, 0; @there ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];}"
               : "+r"(x), "+r"(y), "+r"(z), "+r"(w) : "r"(address), "r"((u32)there) : "memory");
}

template <class Tile>
struct SpreadTile {
  static constexpr int TYPE = Tile::TYPE, BYTES = Tile::BYTES, GROUPS = Tile::GROUPS;
  static constexpr int RUN = BYTES > 1024 || GROUPS > 2 ? 2 : 4;
  static constexpr bool SPREAD = true;
  static_assert(RUN * GROUPS <= 8, "a column for every group");
  u32 x[RUN][8] = {};

  // Adds the products of RUN tiles from `step` on, as far as they are there. Beyond, activations are zero and codes anything.
  DEVICE void add_run(u32 tiles, const Activations& a, int step, int steps, float (&sums)[COLUMN_TILES][4], int lane) {
    const int column = lane / 4;
    const u32 row = a.f16 + step * 128 + lane % 4 * 16;
    // Two chains of instructions, which do not wait for one another.
    float products[2][4] = {};
    #pragma unroll
    for (int i = 0; i < RUN; i++) {
      #pragma unroll
      for (int group = 0; group < GROUPS; group++) {
        u32* to = x[i] + group * (8 / GROUPS);
        const bool mine = column == i * GROUPS + group;
        // Of four groups, two lie in 16 bytes.
        if (GROUPS == 2) shared16_if(mine, row + i * 128 + group * 64, to[0], to[1], to[2], to[3]);
        else shared8_if(mine, row + i * 128 + group / 2 * 64 + group % 2 * 8, to[0], to[1]);
      }
      Tile held;
      held.load(tiles + i * BYTES, lane);
      #pragma unroll
      for (int j = 0; j < 4; j++) {
        u32 registers[4];
        held.unpack(j, registers);
        multiply_add<false>(products[i % 2], registers, x[i][2 * j], x[i][2 * j + 1]);
      }
    }
    // The two groups of this lane.
    const int first = lane % 4 * 2, tile = first / GROUPS, group = first % GROUPS;
    const bool there = tile < RUN && step + tile < steps;
    float2 inputs = make_float2(0.0f, 0.0f);
    if (there) inputs = Tile::inputs_of(a, step + tile, group);
    #pragma unroll
    for (int i = 0; i < 2; i++) {
      float scales[2], offsets[2];
      Tile::scales_of(tiles + (there ? tile : 0) * BYTES, lane / 4 + 8 * i, group, scales, offsets);
      #pragma unroll
      for (int k = 0; k < 2; k++) {
        float& sum = sums[0][2 * i + k];
        if (Tile::OFFSETS) sum = __fmaf_rn(offsets[k], k ? inputs.y : inputs.x, sum);
        sum = __fmaf_rn(scales[k], products[0][2 * i + k] + products[1][2 * i + k], sum);
      }
    }
  }
};

template <> struct TileOf<NIBBLES> { typedef SpreadTile<CodeTile<4, 32>> Tile; };
template <> struct TileOf<EIGHTS> { typedef SpreadTile<CodeTile<8, 32>> Tile; };
template <> struct TileOf<SIXTEENS> { typedef SpreadTile<CodeTile<8, 16>> Tile; };
template <> struct TileOf<MXFP4> { typedef SpreadTile<Mxfp4Tile> Tile; };
