//! Quantized matrices as stored in GGUF files, with 16 output rows interleaved.
//!
//! A file keeps each row by itself: blocks of 32 elements, each an f16 scale, for `Q4_1` an f16 minimum, and the codes. Here a *tile*
//! holds 16 rows, group by group: 16 scales, 16 minimums, then the codes in words of 4 bytes, word `j` of all 16 rows side by side.
//! A lane of a vector is an output row, so a product needs no sum across lanes. No byte changes, so the size is the file's up to
//! the padding of the last tile.

use half::f16;

use crate::activations::GROUP;
use crate::linear::ShapeError;

/// Output rows of a tile.
pub const TILE: usize = 16;

/// Bytes of a part that are packed between two calls of [`PackedMatrix::pack`]'s listener.
const PIECE_BYTES: usize = 8 << 20;

/// Alignment of the tiles, a cache line.
const LINE: usize = 64;

/// How elements are stored; names and layouts are GGUF's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Storage {
    /// `scale * (code - 8)`, codes of 4 bits.
    Q4_0,
    /// `scale * code + minimum`, codes of 4 bits.
    Q4_1,
    /// `scale * code`, codes of 8 bits, signed.
    Q8_0,
}

impl Storage {
    /// The storage of that name, if it is one of these.
    #[must_use]
    pub fn from_name(name: &str) -> Option<Self> {
        match name {
            "Q4_0" => Some(Self::Q4_0),
            "Q4_1" => Some(Self::Q4_1),
            "Q8_0" => Some(Self::Q8_0),
            _ => None,
        }
    }

    /// f16 numbers before the codes of a block.
    pub(crate) const fn header_fields(self) -> usize {
        match self {
            Self::Q4_0 | Self::Q8_0 => 1,
            Self::Q4_1 => 2,
        }
    }

    const fn code_bytes(self) -> usize {
        match self {
            Self::Q4_0 | Self::Q4_1 => GROUP / 2,
            Self::Q8_0 => GROUP,
        }
    }

    /// Bytes of 32 elements.
    #[must_use]
    pub const fn block_bytes(self) -> usize {
        2 * self.header_fields() + self.code_bytes()
    }

    /// Bytes of a group of a tile.
    pub(crate) const fn group_bytes(self) -> usize {
        TILE * self.block_bytes()
    }
}

/// Consecutive output rows as the file stores them.
#[derive(Clone, Copy, Debug)]
pub struct Part<'a> {
    /// The storage of every row.
    pub storage: Storage,
    /// Number of rows.
    pub rows: usize,
    /// The rows one after another, each a whole number of blocks.
    pub data: &'a [u8],
}

/// Why parts cannot be packed.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum PackError {
    /// There is nothing to pack.
    #[error("parts: there is none, or none has a row")]
    Empty,
    /// The bytes of a row are not whole blocks.
    #[error(
        "parts[{part}]: {bytes} bytes are not {rows} rows of blocks of {block_bytes} bytes ({storage:?})"
    )]
    RowBytes {
        /// Index of the part.
        part: usize,
        /// Its bytes.
        bytes: usize,
        /// Its rows.
        rows: usize,
        /// Bytes of a block of its storage.
        block_bytes: usize,
        /// Its storage.
        storage: Storage,
    },
    /// Rows of different lengths.
    #[error("parts[{part}]: rows of {width} elements, expected {expected} as in the parts before")]
    Width {
        /// Index of the part.
        part: usize,
        /// Elements of its rows.
        width: usize,
        /// Elements of the first part's rows.
        expected: usize,
    },
}

/// Rows of one storage: tiles one after another, from a cache line's start.
#[derive(Debug)]
pub(crate) struct Segment {
    pub(crate) storage: Storage,
    pub(crate) rows: usize,
    tile_bytes: usize,
    memory: Vec<u8>,
    start: usize,
}

impl Segment {
    fn new(storage: Storage, rows: usize, width: usize) -> Self {
        let tile_bytes = storage.group_bytes() * (width / GROUP);
        let memory = vec![0; rows.div_ceil(TILE) * tile_bytes + LINE - 1];
        let offset = memory.as_ptr().align_offset(LINE);
        Self {
            storage,
            rows,
            tile_bytes,
            memory,
            start: if offset < LINE { offset } else { 0 },
        }
    }

    pub(crate) fn num_tiles(&self) -> usize {
        self.rows.div_ceil(TILE)
    }

    pub(crate) fn tile_bytes(&self) -> usize {
        self.tile_bytes
    }

    pub(crate) fn tile(&self, tile: usize) -> &[u8] {
        &self.memory[self.start + tile * self.tile_bytes..][..self.tile_bytes]
    }

    /// Interleave one row of the file.
    fn write_row(&mut self, row: usize, blocks: &[u8]) {
        let fields = self.storage.header_fields();
        let (lane, group_bytes) = (row % TILE, self.storage.group_bytes());
        let tile = self.start + row / TILE * self.tile_bytes;
        let tile = &mut self.memory[tile..tile + self.tile_bytes];
        let blocks = blocks.chunks_exact(self.storage.block_bytes());
        for (group, block) in tile.chunks_exact_mut(group_bytes).zip(blocks) {
            let (header, codes) = group.split_at_mut(2 * TILE * fields);
            let (block_header, block_codes) = block.split_at(2 * fields);
            for (field, bytes) in block_header.as_chunks::<2>().0.iter().enumerate() {
                header[2 * (TILE * field + lane)..][..2].copy_from_slice(bytes);
            }
            for (word, bytes) in block_codes.as_chunks::<4>().0.iter().enumerate() {
                codes[4 * (TILE * word + lane)..][..4].copy_from_slice(bytes);
            }
        }
    }

    /// Dequantize one row to `out`, of the matrix's width.
    fn read_row(&self, row: usize, out: &mut [f32]) {
        let fields = self.storage.header_fields();
        let lane = row % TILE;
        let groups = self
            .tile(row / TILE)
            .chunks_exact(self.storage.group_bytes());
        for (group, out) in groups.zip(out.as_chunks_mut::<GROUP>().0) {
            let (header, codes) = group.split_at(2 * TILE * fields);
            let scale = half_at(header, lane);
            let word = |j: usize| {
                let at = 4 * (TILE * j + lane);
                &codes[at..at + 4]
            };
            match self.storage {
                Storage::Q8_0 => {
                    for (j, out) in out.as_chunks_mut::<4>().0.iter_mut().enumerate() {
                        for (value, &code) in out.iter_mut().zip(word(j)) {
                            *value = scale * f32::from(code as i8);
                        }
                    }
                }
                Storage::Q4_0 | Storage::Q4_1 => {
                    let minimum = match self.storage {
                        Storage::Q4_1 => half_at(header, TILE + lane),
                        _ => -8.0 * scale,
                    };
                    let (low, high) = out.split_at_mut(GROUP / 2);
                    for (i, (low, high)) in low.iter_mut().zip(high).enumerate() {
                        let code = word(i / 4)[i % 4];
                        *low = scale * f32::from(code & 15) + minimum;
                        *high = scale * f32::from(code >> 4) + minimum;
                    }
                }
            }
        }
    }
}

/// Number `index` of a run of f16 numbers.
pub(crate) fn half_at(header: &[u8], index: usize) -> f32 {
    f16::from_le_bytes([header[2 * index], header[2 * index + 1]]).to_f32()
}

/// A matrix `[out, in]` that stays quantized.
#[derive(Debug)]
pub struct PackedMatrix {
    pub(crate) segments: Vec<Segment>,
    rows: usize,
    width: usize,
}

impl PackedMatrix {
    /// Pack `parts`, stacked along `out` in the given order. Their storages may differ.
    ///
    /// # Errors
    /// [`PackError`] if there is no row, or a part's bytes do not make rows of the first part's width.
    pub fn new(parts: &[Part<'_>]) -> Result<Self, PackError> {
        Self::pack(parts, |_, _| ())
    }

    /// [`new`](Self::new), calling `packed(part, rows)` whenever further rows of a part, some megabytes at most, will not be read again.
    ///
    /// # Errors
    /// Those of `new`.
    pub fn pack(
        parts: &[Part<'_>],
        mut packed: impl FnMut(usize, usize),
    ) -> Result<Self, PackError> {
        let mut width = None;
        for (index, part) in parts.iter().enumerate().filter(|(_, part)| part.rows > 0) {
            let found = part_width(index, part)?;
            let expected = *width.get_or_insert(found);
            if found != expected {
                return Err(PackError::Width {
                    part: index,
                    width: found,
                    expected,
                });
            }
        }
        let width = width.ok_or(PackError::Empty)?;
        // Neighbours of one storage share tiles, so that only the last tile of a run is padded.
        let mut first = 0;
        let mut segments = Vec::new();
        for run in parts.chunk_by(|a, b| a.storage == b.storage) {
            let segment = pack_run(run, width, |part, rows| packed(first + part, rows));
            first += run.len();
            if segment.rows > 0 {
                segments.push(segment);
            }
        }
        Ok(Self {
            rows: segments.iter().map(|segment| segment.rows).sum(),
            segments,
            width,
        })
    }

    /// Output rows, `out`.
    #[must_use]
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Elements of a row, `in`.
    #[must_use]
    pub fn width(&self) -> usize {
        self.width
    }

    /// Bytes of the packed rows, the padding of tiles included.
    #[must_use]
    pub fn num_bytes(&self) -> usize {
        self.segments
            .iter()
            .map(|segment| segment.num_tiles() * segment.tile_bytes)
            .sum()
    }

    /// Dequantize the rows `ids` to `out`, `[len(ids), in]` row major.
    ///
    /// # Errors
    /// [`ShapeError`] if `out` has another length or an id is not a row; `out` may be written in part then.
    pub fn read_rows(&self, ids: &[i64], out: &mut [f32]) -> Result<(), ShapeError> {
        let expected = ids.len() * self.width;
        if out.len() != expected {
            return Err(ShapeError::Out {
                len: out.len(),
                expected,
            });
        }
        for (&id, out) in ids.iter().zip(out.chunks_exact_mut(self.width)) {
            let row = usize::try_from(id)
                .ok()
                .and_then(|row| self.locate(row))
                .ok_or(ShapeError::Id {
                    id,
                    rows: self.rows,
                })?;
            row.0.read_row(row.1, out);
        }
        Ok(())
    }

    /// The segment of a row, and the row's index in it.
    fn locate(&self, mut row: usize) -> Option<(&Segment, usize)> {
        for segment in &self.segments {
            if row < segment.rows {
                return Some((segment, row));
            }
            row -= segment.rows;
        }
        None
    }
}

/// Elements of a row of `part`, which has rows.
fn part_width(index: usize, part: &Part<'_>) -> Result<usize, PackError> {
    let block_bytes = part.storage.block_bytes();
    let row_bytes = part.data.len() / part.rows;
    if row_bytes == 0
        || row_bytes * part.rows != part.data.len()
        || !row_bytes.is_multiple_of(block_bytes)
    {
        return Err(PackError::RowBytes {
            part: index,
            bytes: part.data.len(),
            rows: part.rows,
            block_bytes,
            storage: part.storage,
        });
    }
    Ok(row_bytes / block_bytes * GROUP)
}

fn pack_run(run: &[Part<'_>], width: usize, mut packed: impl FnMut(usize, usize)) -> Segment {
    let storage = run[0].storage;
    let row_bytes = width / GROUP * storage.block_bytes();
    let mut segment = Segment::new(storage, run.iter().map(|part| part.rows).sum(), width);
    let rows_at_once = (PIECE_BYTES / row_bytes).max(1);
    let mut row = 0;
    for (index, part) in run.iter().enumerate().filter(|(_, part)| part.rows > 0) {
        let mut rows = 0;
        for piece in part.data.chunks(rows_at_once * row_bytes) {
            for blocks in piece.chunks_exact(row_bytes) {
                segment.write_row(row, blocks);
                row += 1;
                rows += 1;
            }
            packed(index, rows);
        }
    }
    segment
}
