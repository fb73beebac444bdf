//! A bounded parser of GGUF v2 and v3 headers: metadata and tensor infos, never tensor values.
//!
//! Every count and length of the file is checked against the bytes that are left before anything is allocated, so a
//! hostile header costs at most a small multiple of its own size and ends in a [`GgufError`] that says what, where and
//! which limit. Format: the GGUF specification of the ggml project, little-endian files.

mod error;
mod reader;
mod types;
mod value;

#[cfg(test)]
pub(crate) mod tests;

use std::collections::HashMap;
use std::fs::File;
use std::ops::Deref;
use std::path::Path;

pub use error::{GgufError, What};
use reader::Reader;
pub use types::GgmlType;
pub use value::{Array, FromValue, StringArray, Value, ValueType};

/// First four bytes of every GGUF file.
pub const MAGIC: [u8; 4] = *b"GGUF";
/// Most dimensions a tensor may have (`GGML_MAX_DIMS`).
pub const MAX_DIMS: u32 = 4;
/// Most levels of arrays inside arrays that metadata may have.
pub const MAX_ARRAY_DEPTH: u32 = 4;
/// Alignment of tensor data when `general.alignment` is absent, in bytes.
pub const DEFAULT_ALIGNMENT: u32 = 32;

/// Fewest bytes of a metadata entry: key length, value type and a one-byte value.
const MIN_ENTRY_BYTES: u64 = 8 + 4 + 1;
/// Fewest bytes of a tensor info: name length, dimension count, type and offset.
const MIN_TENSOR_BYTES: u64 = 8 + 4 + 4 + 8;

/// One tensor of the file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TensorInfo {
    /// Name, unique in the file.
    pub name: String,
    /// Dimensions in ggml order: `dims[0]` is the contiguous one.
    pub dims: Vec<u64>,
    /// Storage type.
    pub ggml_type: GgmlType,
    /// Offset of the first byte from the start of the file.
    pub offset: u64,
    /// Length in bytes; `offset + byte_len` is inside the file.
    pub byte_len: u64,
}

impl TensorInfo {
    /// Number of elements.
    pub fn num_elements(&self) -> u64 {
        self.dims.iter().product()
    }
}

/// A parsed GGUF file: its metadata, its tensor infos and the bytes they point into.
#[derive(Debug)]
pub struct Gguf {
    version: u32,
    alignment: u32,
    data_offset: u64,
    entries: Vec<(String, Value)>,
    index: HashMap<String, usize>,
    tensors: Vec<TensorInfo>,
    tensor_index: HashMap<String, usize>,
    bytes: Bytes,
}

#[derive(Debug)]
enum Bytes {
    Mapped(memmap2::Mmap),
    Owned(Vec<u8>),
}

impl Deref for Bytes {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        match self {
            Bytes::Mapped(map) => map,
            Bytes::Owned(bytes) => bytes,
        }
    }
}

impl Gguf {
    /// Maps the file and parses its header.
    ///
    /// The file must not shrink while it is mapped; weights are never changed in place by their tools.
    pub fn open(path: impl AsRef<Path>) -> Result<Self, GgufError> {
        let path = path.as_ref();
        let io = |source| GgufError::Io {
            path: path.to_path_buf(),
            source,
        };
        let file = File::open(path).map_err(io)?;
        if file.metadata().map_err(io)?.len() == 0 {
            return Self::parse(Bytes::Owned(Vec::new()));
        }
        // SAFETY: the map is private and read-only; that nobody truncates a weight file in use is this function's contract.
        let map = unsafe { memmap2::Mmap::map(&file) }.map_err(io)?;
        Self::parse(Bytes::Mapped(map))
    }

    /// Parses a whole file that is already in memory.
    pub fn from_bytes(bytes: Vec<u8>) -> Result<Self, GgufError> {
        Self::parse(Bytes::Owned(bytes))
    }

    fn parse(bytes: Bytes) -> Result<Self, GgufError> {
        let mut reader = Reader::new(&bytes);
        let version = read_version(&mut reader)?;
        let num_tensors = reader.u64(What::Header("tensor count"))?;
        let num_entries = reader.u64(What::Header("metadata count"))?;
        reader.check_count(What::Header("metadata count"), num_entries, MIN_ENTRY_BYTES)?;
        reader.check_count(What::Header("tensor count"), num_tensors, MIN_TENSOR_BYTES)?;

        let (entries, index) = read_entries(&mut reader, num_entries)?;
        let alignment = read_alignment(&entries, &index)?;
        let mut tensors = read_tensor_infos(&mut reader, num_tensors)?;
        let data_offset = if tensors.is_empty() {
            reader.offset()
        } else {
            reader.offset().next_multiple_of(u64::from(alignment))
        };
        let tensor_index = place_tensors(&mut tensors, data_offset, alignment, bytes.len() as u64)?;
        Ok(Self {
            version,
            alignment,
            data_offset,
            entries,
            index,
            tensors,
            tensor_index,
            bytes,
        })
    }

    /// Format version of the file, 2 or 3.
    pub fn version(&self) -> u32 {
        self.version
    }

    /// Alignment of tensor data, in bytes.
    pub fn alignment(&self) -> u32 {
        self.alignment
    }

    /// Where tensor data begins, in bytes from the start of the file.
    pub fn data_offset(&self) -> u64 {
        self.data_offset
    }

    /// Size of the whole file, in bytes.
    pub fn file_len(&self) -> u64 {
        self.bytes.len() as u64
    }

    /// The value of a metadata key.
    pub fn metadata(&self, key: &str) -> Option<&Value> {
        self.index.get(key).map(|&i| &self.entries[i].1)
    }

    /// All metadata, in the order of the file.
    pub fn entries(&self) -> impl ExactSizeIterator<Item = (&str, &Value)> {
        self.entries
            .iter()
            .map(|(key, value)| (key.as_str(), value))
    }

    /// A metadata value as `T`, or `None` if the key is absent.
    ///
    /// Integers convert between widths when the value fits. Errors: [`GgufError::WrongType`], [`GgufError::OutOfRange`].
    pub fn get<'a, T: FromValue<'a>>(&'a self, key: &str) -> Result<Option<T>, GgufError> {
        self.metadata(key)
            .map(|value| T::from_value(key, value))
            .transpose()
    }

    /// A metadata value as `T`; an absent key is [`GgufError::MissingKey`].
    pub fn require<'a, T: FromValue<'a>>(&'a self, key: &str) -> Result<T, GgufError> {
        self.get(key)?.ok_or_else(|| GgufError::MissingKey {
            key: key.to_owned(),
        })
    }

    /// All tensors, in the order of the file.
    pub fn tensors(&self) -> &[TensorInfo] {
        &self.tensors
    }

    /// The tensor of that name.
    pub fn tensor(&self, name: &str) -> Option<&TensorInfo> {
        self.tensor_index.get(name).map(|&i| &self.tensors[i])
    }

    /// The stored bytes of a tensor of this file.
    ///
    /// Empty if `info` comes from another file and does not lie inside this one.
    pub fn tensor_data(&self, info: &TensorInfo) -> &[u8] {
        let end = info.offset.saturating_add(info.byte_len);
        self.bytes
            .get(info.offset as usize..end as usize)
            .unwrap_or(&[])
    }
}

/// Room to reserve for `count` claimed items whose size in memory exceeds that in the file; honest files need no more.
fn first_capacity(count: u64) -> usize {
    count.min(4096) as usize
}

fn read_version(reader: &mut Reader<'_>) -> Result<u32, GgufError> {
    let magic: [u8; 4] = reader.array(What::Header("magic"))?;
    if magic != MAGIC {
        return Err(GgufError::BadMagic { found: magic });
    }
    let version = reader.u32(What::Header("version"))?;
    match version {
        2 | 3 => Ok(version),
        _ if matches!(version.swap_bytes(), 1..=3) => Err(GgufError::BigEndian),
        _ => Err(GgufError::UnsupportedVersion { version }),
    }
}

type Entries = (Vec<(String, Value)>, HashMap<String, usize>);

fn read_entries(reader: &mut Reader<'_>, count: u64) -> Result<Entries, GgufError> {
    let mut entries = Vec::with_capacity(first_capacity(count));
    let mut index = HashMap::with_capacity(first_capacity(count));
    for i in 0..count {
        let key = reader.string(What::Key(i))?.to_owned();
        let value = value::read_value(reader, &key)?;
        if index.insert(key.clone(), entries.len()).is_some() {
            return Err(GgufError::DuplicateKey { key });
        }
        entries.push((key, value));
    }
    Ok((entries, index))
}

fn read_alignment(
    entries: &[(String, Value)],
    index: &HashMap<String, usize>,
) -> Result<u32, GgufError> {
    const KEY: &str = "general.alignment";
    let Some(&i) = index.get(KEY) else {
        return Ok(DEFAULT_ALIGNMENT);
    };
    let alignment = u32::from_value(KEY, &entries[i].1)?;
    if !alignment.is_power_of_two() {
        return Err(GgufError::BadAlignment { alignment });
    }
    Ok(alignment)
}

/// Reads names, dimensions, types and offsets; offsets stay relative to the data section until [`place_tensors`].
fn read_tensor_infos(reader: &mut Reader<'_>, count: u64) -> Result<Vec<TensorInfo>, GgufError> {
    let mut tensors = Vec::with_capacity(first_capacity(count));
    for i in 0..count {
        let name = reader.string(What::TensorName(i))?.to_owned();
        let num_dims = reader.u32(What::Tensor(&name))?;
        if num_dims > MAX_DIMS {
            return Err(GgufError::TooManyDims {
                tensor: name,
                num_dims,
                limit: MAX_DIMS,
            });
        }
        let mut dims = Vec::with_capacity(num_dims as usize);
        for _ in 0..num_dims {
            dims.push(reader.u64(What::Tensor(&name))?);
        }
        let type_id = reader.u32(What::Tensor(&name))?;
        let Some(ggml_type) = GgmlType::from_id(type_id) else {
            return Err(GgufError::UnknownTensorType {
                tensor: name,
                type_id,
            });
        };
        let offset = reader.u64(What::Tensor(&name))?;
        let byte_len = byte_len(&name, &dims, ggml_type)?;
        tensors.push(TensorInfo {
            name,
            dims,
            ggml_type,
            offset,
            byte_len,
        });
    }
    Ok(tensors)
}

fn byte_len(name: &str, dims: &[u64], ggml_type: GgmlType) -> Result<u64, GgufError> {
    let overflow = || GgufError::SizeOverflow {
        tensor: name.to_owned(),
        dims: dims.to_vec(),
    };
    if let Some(position) = dims.iter().position(|&d| d == 0) {
        return Err(GgufError::ZeroDim {
            tensor: name.to_owned(),
            position,
        });
    }
    let elements = dims
        .iter()
        .try_fold(1_u64, |product, &d| product.checked_mul(d))
        .ok_or_else(overflow)?;
    let block = u64::from(ggml_type.block_size());
    let row = dims.first().copied().unwrap_or(1);
    if row % block != 0 {
        return Err(GgufError::RowNotDivisible {
            tensor: name.to_owned(),
            row,
            ggml_type,
            block,
        });
    }
    (elements / block)
        .checked_mul(u64::from(ggml_type.block_bytes()))
        .ok_or_else(overflow)
}

/// Makes offsets absolute and checks that every tensor is aligned, inside the file, unique by name and apart from others.
fn place_tensors(
    tensors: &mut [TensorInfo],
    data_offset: u64,
    alignment: u32,
    file_len: u64,
) -> Result<HashMap<String, usize>, GgufError> {
    let mut index = HashMap::with_capacity(tensors.len());
    for (i, tensor) in tensors.iter_mut().enumerate() {
        if tensor.offset % u64::from(alignment) != 0 {
            return Err(GgufError::Misaligned {
                tensor: tensor.name.clone(),
                offset: tensor.offset,
                alignment,
            });
        }
        let start = data_offset.checked_add(tensor.offset);
        match start.and_then(|start| start.checked_add(tensor.byte_len)) {
            Some(end) if end <= file_len => tensor.offset += data_offset,
            _ => {
                return Err(GgufError::OutsideFile {
                    tensor: tensor.name.clone(),
                    offset: tensor.offset,
                    byte_len: tensor.byte_len,
                    data_len: file_len.saturating_sub(data_offset),
                });
            }
        }
        if index.insert(tensor.name.clone(), i).is_some() {
            return Err(GgufError::DuplicateTensor {
                tensor: tensor.name.clone(),
            });
        }
    }
    check_apart(tensors, data_offset)?;
    Ok(index)
}

fn check_apart(tensors: &[TensorInfo], data_offset: u64) -> Result<(), GgufError> {
    let mut sorted: Vec<&TensorInfo> = tensors.iter().collect();
    sorted.sort_unstable_by_key(|tensor| tensor.offset);
    for pair in sorted.windows(2) {
        if pair[0].offset + pair[0].byte_len > pair[1].offset {
            return Err(GgufError::Overlap {
                first: pair[0].name.clone(),
                second: pair[1].name.clone(),
                offset: pair[1].offset - data_offset,
            });
        }
    }
    Ok(())
}
