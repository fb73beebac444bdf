//! What can be wrong with a GGUF file.

use std::fmt;
use std::path::PathBuf;

use super::types::GgmlType;
use super::value::ValueType;

/// The part of the header that was being read, for error messages.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum What<'a> {
    /// A field of the fixed header.
    Header(&'static str),
    /// The key of the metadata entry with that number.
    Key(u64),
    /// The value of the metadata key.
    Value(&'a str),
    /// The name of the tensor with that number.
    TensorName(u64),
    /// A field of the tensor's info.
    Tensor(&'a str),
}

impl fmt::Display for What<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            What::Header(field) => write!(f, "the {field} of the header"),
            What::Key(i) => write!(f, "the key of metadata entry {i}"),
            What::Value(key) => write!(f, "the value of metadata key {key:?}"),
            What::TensorName(i) => write!(f, "the name of tensor {i}"),
            What::Tensor(name) => write!(f, "the info of tensor {name:?}"),
        }
    }
}

/// Why a GGUF file, or one of its metadata values, cannot be used.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the messages name every field")]
pub enum GgufError {
    #[error("cannot read {}: {source}", path.display())]
    Io {
        path: PathBuf,
        source: std::io::Error,
    },
    #[error("not a GGUF file: it starts with {found:02x?}, not with \"GGUF\"")]
    BadMagic { found: [u8; 4] },
    #[error("big-endian GGUF files are not supported")]
    BigEndian,
    #[error("GGUF version {version} is not supported (2 and 3 are)")]
    UnsupportedVersion { version: u32 },
    #[error(
        "the file ends inside {what}: {needed} bytes needed at offset {offset}, {available} left"
    )]
    Truncated {
        what: String,
        offset: u64,
        needed: u64,
        available: u64,
    },
    #[error(
        "{what}: a count of {count} needs more than the {available} bytes left at offset {offset} (at most {limit} fit)"
    )]
    CountTooLarge {
        what: String,
        offset: u64,
        count: u64,
        limit: u64,
        available: u64,
    },
    #[error("{what} is not UTF-8 (offset {offset})")]
    NotUtf8 { what: String, offset: u64 },
    #[error("metadata key {key:?} appears twice")]
    DuplicateKey { key: String },
    #[error("metadata key {key:?} has the unknown value type {type_id} (offset {offset})")]
    UnknownValueType {
        key: String,
        type_id: u32,
        offset: u64,
    },
    #[error(
        "metadata key {key:?} has a boolean of value {value} (offset {offset}), only 0 and 1 are legal"
    )]
    BadBool { key: String, value: u8, offset: u64 },
    #[error("metadata key {key:?} nests arrays deeper than {limit} levels")]
    NestedTooDeep { key: String, limit: u32 },
    #[error("general.alignment is {alignment}, not a power of two")]
    BadAlignment { alignment: u32 },
    #[error("tensor {tensor:?} has {num_dims} dimensions, at most {limit} are legal")]
    TooManyDims {
        tensor: String,
        num_dims: u32,
        limit: u32,
    },
    #[error("dimension {position} of tensor {tensor:?} is 0")]
    ZeroDim { tensor: String, position: usize },
    #[error("the size of tensor {tensor:?} with dimensions {dims:?} overflows 64 bits")]
    SizeOverflow { tensor: String, dims: Vec<u64> },
    #[error("tensor {tensor:?} has the unknown ggml type {type_id}")]
    UnknownTensorType { tensor: String, type_id: u32 },
    #[error(
        "rows of tensor {tensor:?} have {row} elements, not a multiple of the {block} of a {ggml_type} block"
    )]
    RowNotDivisible {
        tensor: String,
        row: u64,
        ggml_type: GgmlType,
        block: u64,
    },
    #[error(
        "tensor {tensor:?} is at offset {offset} of the data, not a multiple of the alignment {alignment}"
    )]
    Misaligned {
        tensor: String,
        offset: u64,
        alignment: u32,
    },
    #[error(
        "tensor {tensor:?} ({byte_len} bytes at offset {offset} of the data) ends outside the {data_len} bytes of data"
    )]
    OutsideFile {
        tensor: String,
        offset: u64,
        byte_len: u64,
        data_len: u64,
    },
    #[error("tensors {first:?} and {second:?} share bytes from offset {offset} of the data on")]
    Overlap {
        first: String,
        second: String,
        offset: u64,
    },
    #[error("two tensors are named {tensor:?}")]
    DuplicateTensor { tensor: String },
    #[error("metadata key {key:?} is missing")]
    MissingKey { key: String },
    #[error("metadata key {key:?} is of type {found}, expected {expected}")]
    WrongType {
        key: String,
        expected: &'static str,
        found: ValueType,
    },
    #[error("metadata key {key:?} is {value}, out of range for {expected}")]
    OutOfRange {
        key: String,
        value: String,
        expected: &'static str,
    },
}
