//! Metadata values, their arrays and typed access to them.

use std::fmt;

use super::error::{GgufError, What};
use super::reader::Reader;
use super::{MAX_ARRAY_DEPTH, first_capacity};

/// Fewest bytes of a string: its length.
const MIN_STRING_BYTES: u64 = 8;
/// Fewest bytes of an array: its element type and its count.
const MIN_ARRAY_BYTES: u64 = 4 + 8;

/// Many strings in one allocation.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct StringArray {
    text: String,
    ends: Vec<usize>,
}

impl StringArray {
    /// Number of strings.
    pub fn len(&self) -> usize {
        self.ends.len()
    }

    /// Whether there is no string.
    pub fn is_empty(&self) -> bool {
        self.ends.is_empty()
    }

    /// The string at index `i`.
    pub fn get(&self, i: usize) -> Option<&str> {
        let end = *self.ends.get(i)?;
        let start = if i == 0 { 0 } else { self.ends[i - 1] };
        Some(&self.text[start..end])
    }

    /// All strings in order.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = &str> {
        let mut start = 0;
        self.ends.iter().map(move |&end| {
            let string = &self.text[start..end];
            start = end;
            string
        })
    }
}

macro_rules! numeric_values {
    ($($name:ident = $id:literal: $type:ty;)*) => {
        /// The type of a metadata value, with the format's own numbers.
        #[allow(missing_docs, reason = "the names say it")]
        #[derive(Debug, Clone, Copy, PartialEq, Eq)]
        pub enum ValueType {
            $($name,)*
            Bool,
            String,
            Array,
        }

        impl ValueType {
            fn from_id(id: u32) -> Option<Self> {
                match id {
                    $($id => Some(ValueType::$name),)*
                    7 => Some(ValueType::Bool),
                    8 => Some(ValueType::String),
                    9 => Some(ValueType::Array),
                    _ => None,
                }
            }

            /// Fewest bytes of one value of this type.
            fn min_bytes(self) -> u64 {
                match self {
                    $(ValueType::$name => size_of::<$type>() as u64,)*
                    ValueType::Bool => 1,
                    ValueType::String => MIN_STRING_BYTES,
                    ValueType::Array => MIN_ARRAY_BYTES,
                }
            }
        }

        /// A metadata value.
        #[allow(missing_docs, reason = "the names say it")]
        #[derive(Debug, Clone, PartialEq)]
        pub enum Value {
            $($name($type),)*
            Bool(bool),
            String(String),
            Array(Array),
        }

        impl Value {
            /// The type of the value.
            pub fn value_type(&self) -> ValueType {
                match self {
                    $(Value::$name(_) => ValueType::$name,)*
                    Value::Bool(_) => ValueType::Bool,
                    Value::String(_) => ValueType::String,
                    Value::Array(_) => ValueType::Array,
                }
            }
        }

        /// An array of metadata values of one type.
        #[allow(missing_docs, reason = "the names say it")]
        #[derive(Debug, Clone, PartialEq)]
        pub enum Array {
            $($name(Vec<$type>),)*
            Bool(Vec<bool>),
            String(StringArray),
            Array(Vec<Array>),
        }

        impl Array {
            /// Number of elements.
            pub fn len(&self) -> usize {
                match self {
                    $(Array::$name(values) => values.len(),)*
                    Array::Bool(values) => values.len(),
                    Array::String(values) => values.len(),
                    Array::Array(values) => values.len(),
                }
            }

            /// Whether there is no element.
            pub fn is_empty(&self) -> bool {
                self.len() == 0
            }

            /// The type of the elements.
            pub fn element_type(&self) -> ValueType {
                match self {
                    $(Array::$name(_) => ValueType::$name,)*
                    Array::Bool(_) => ValueType::Bool,
                    Array::String(_) => ValueType::String,
                    Array::Array(_) => ValueType::Array,
                }
            }
        }

        fn read_scalar(reader: &mut Reader<'_>, key: &str, value_type: ValueType) -> Result<Value, GgufError> {
            Ok(match value_type {
                $(ValueType::$name => Value::$name(<$type>::from_le_bytes(reader.array(What::Value(key))?)),)*
                ValueType::Bool => Value::Bool(read_bools(reader, key, 1)?[0]),
                ValueType::String => Value::String(reader.string(What::Value(key))?.to_owned()),
                ValueType::Array => Value::Array(read_array(reader, key, 1)?),
            })
        }

        fn read_elements(
            reader: &mut Reader<'_>,
            key: &str,
            element_type: ValueType,
            count: u64,
            depth: u32,
        ) -> Result<Array, GgufError> {
            reader.check_count(What::Value(key), count, element_type.min_bytes())?;
            Ok(match element_type {
                $(ValueType::$name => {
                    const SIZE: usize = size_of::<$type>();
                    let bytes = reader.take(What::Value(key), count * SIZE as u64)?;
                    let read = |chunk: &[u8]| {
                        <$type>::from_le_bytes(chunk.try_into().expect("invariant: chunks_exact gives whole chunks"))
                    };
                    Array::$name(bytes.chunks_exact(SIZE).map(read).collect())
                })*
                ValueType::Bool => Array::Bool(read_bools(reader, key, count)?),
                ValueType::String => Array::String(read_strings(reader, key, count)?),
                ValueType::Array => {
                    let mut arrays = Vec::with_capacity(first_capacity(count));
                    for _ in 0..count {
                        arrays.push(read_array(reader, key, depth + 1)?);
                    }
                    Array::Array(arrays)
                }
            })
        }
    };
}

numeric_values! {
    U8 = 0: u8;
    I8 = 1: i8;
    U16 = 2: u16;
    I16 = 3: i16;
    U32 = 4: u32;
    I32 = 5: i32;
    F32 = 6: f32;
    U64 = 10: u64;
    I64 = 11: i64;
    F64 = 12: f64;
}

impl fmt::Display for ValueType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", format!("{self:?}").to_lowercase())
    }
}

pub(super) fn read_value(reader: &mut Reader<'_>, key: &str) -> Result<Value, GgufError> {
    let value_type = read_type(reader, key)?;
    read_scalar(reader, key, value_type)
}

fn read_type(reader: &mut Reader<'_>, key: &str) -> Result<ValueType, GgufError> {
    let offset = reader.offset();
    let type_id = reader.u32(What::Value(key))?;
    ValueType::from_id(type_id).ok_or_else(|| GgufError::UnknownValueType {
        key: key.to_owned(),
        type_id,
        offset,
    })
}

fn read_array(reader: &mut Reader<'_>, key: &str, depth: u32) -> Result<Array, GgufError> {
    if depth > MAX_ARRAY_DEPTH {
        return Err(GgufError::NestedTooDeep {
            key: key.to_owned(),
            limit: MAX_ARRAY_DEPTH,
        });
    }
    let element_type = read_type(reader, key)?;
    let count = reader.u64(What::Value(key))?;
    read_elements(reader, key, element_type, count, depth)
}

fn read_bools(reader: &mut Reader<'_>, key: &str, count: u64) -> Result<Vec<bool>, GgufError> {
    let offset = reader.offset();
    let bytes = reader.take(What::Value(key), count)?;
    let read = |(i, &value): (usize, &u8)| match value {
        0 => Ok(false),
        1 => Ok(true),
        _ => Err(GgufError::BadBool {
            key: key.to_owned(),
            value,
            offset: offset + i as u64,
        }),
    };
    bytes.iter().enumerate().map(read).collect()
}

fn read_strings(reader: &mut Reader<'_>, key: &str, count: u64) -> Result<StringArray, GgufError> {
    let mut strings = StringArray {
        text: String::new(),
        ends: Vec::with_capacity(count as usize),
    };
    for _ in 0..count {
        strings.text.push_str(reader.string(What::Value(key))?);
        strings.ends.push(strings.text.len());
    }
    Ok(strings)
}

/// Types that a metadata value can be read as.
pub trait FromValue<'a>: Sized {
    /// Converts the value of `key`, or says why that is impossible.
    fn from_value(key: &str, value: &'a Value) -> Result<Self, GgufError>;
}

fn wrong_type(key: &str, expected: &'static str, value: &Value) -> GgufError {
    GgufError::WrongType {
        key: key.to_owned(),
        expected,
        found: value.value_type(),
    }
}

macro_rules! integers {
    ($($type:ident)*) => {$(
        impl FromValue<'_> for $type {
            fn from_value(key: &str, value: &Value) -> Result<Self, GgufError> {
                let wide = match *value {
                    Value::U8(v) => i128::from(v),
                    Value::I8(v) => i128::from(v),
                    Value::U16(v) => i128::from(v),
                    Value::I16(v) => i128::from(v),
                    Value::U32(v) => i128::from(v),
                    Value::I32(v) => i128::from(v),
                    Value::U64(v) => i128::from(v),
                    Value::I64(v) => i128::from(v),
                    _ => return Err(wrong_type(key, stringify!($type), value)),
                };
                $type::try_from(wide).map_err(|_| GgufError::OutOfRange {
                    key: key.to_owned(),
                    value: wide.to_string(),
                    expected: stringify!($type),
                })
            }
        }
    )*};
}

integers!(u32 i32 u64 i64 usize);

impl FromValue<'_> for f64 {
    fn from_value(key: &str, value: &Value) -> Result<Self, GgufError> {
        match *value {
            Value::F32(v) => Ok(f64::from(v)),
            Value::F64(v) => Ok(v),
            _ => Err(wrong_type(key, "f64", value)),
        }
    }
}

impl FromValue<'_> for f32 {
    fn from_value(key: &str, value: &Value) -> Result<Self, GgufError> {
        match *value {
            Value::F32(v) => Ok(v),
            Value::F64(v) => Ok(v as f32),
            _ => Err(wrong_type(key, "f32", value)),
        }
    }
}

impl FromValue<'_> for bool {
    fn from_value(key: &str, value: &Value) -> Result<Self, GgufError> {
        match *value {
            Value::Bool(v) => Ok(v),
            _ => Err(wrong_type(key, "bool", value)),
        }
    }
}

impl<'a> FromValue<'a> for &'a str {
    fn from_value(key: &str, value: &'a Value) -> Result<Self, GgufError> {
        match value {
            Value::String(v) => Ok(v),
            _ => Err(wrong_type(key, "string", value)),
        }
    }
}

impl<'a> FromValue<'a> for &'a Array {
    fn from_value(key: &str, value: &'a Value) -> Result<Self, GgufError> {
        match value {
            Value::Array(v) => Ok(v),
            _ => Err(wrong_type(key, "array", value)),
        }
    }
}

impl<'a> FromValue<'a> for &'a StringArray {
    fn from_value(key: &str, value: &'a Value) -> Result<Self, GgufError> {
        match value {
            Value::Array(Array::String(v)) => Ok(v),
            _ => Err(wrong_type(key, "array of strings", value)),
        }
    }
}

impl<'a> FromValue<'a> for &'a [f32] {
    fn from_value(key: &str, value: &'a Value) -> Result<Self, GgufError> {
        match value {
            Value::Array(Array::F32(v)) => Ok(v),
            _ => Err(wrong_type(key, "array of f32", value)),
        }
    }
}

impl<'a> FromValue<'a> for &'a [i32] {
    fn from_value(key: &str, value: &'a Value) -> Result<Self, GgufError> {
        match value {
            Value::Array(Array::I32(v)) => Ok(v),
            _ => Err(wrong_type(key, "array of i32", value)),
        }
    }
}
