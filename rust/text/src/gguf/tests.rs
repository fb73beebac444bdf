use proptest::prelude::*;

use super::*;

/// Writes GGUF files byte by byte, without the parser's own definitions.
#[derive(Default, Clone)]
pub(crate) struct Writer {
    entries: Vec<Vec<u8>>,
    tensors: Vec<Vec<u8>>,
    data: Vec<u8>,
}

pub(crate) fn text(s: &str) -> Vec<u8> {
    [&(s.len() as u64).to_le_bytes()[..], s.as_bytes()].concat()
}

impl Writer {
    pub(crate) fn entry(mut self, key: &str, type_id: u32, value: &[u8]) -> Self {
        self.entries
            .push([&text(key)[..], &type_id.to_le_bytes(), value].concat());
        self
    }

    pub(crate) fn array(self, key: &str, type_id: u32, count: u64, elements: &[u8]) -> Self {
        let value = [&type_id.to_le_bytes()[..], &count.to_le_bytes(), elements].concat();
        self.entry(key, 9, &value)
    }

    pub(crate) fn strings(self, key: &str, strings: &[&str]) -> Self {
        let elements: Vec<u8> = strings.iter().flat_map(|s| text(s)).collect();
        self.array(key, 8, strings.len() as u64, &elements)
    }

    fn tensor(mut self, name: &str, dims: &[u64], type_id: u32, offset: u64) -> Self {
        let dim_bytes: Vec<u8> = dims.iter().flat_map(|d| d.to_le_bytes()).collect();
        let count = (dims.len() as u32).to_le_bytes();
        self.tensors.push(
            [
                &text(name)[..],
                &count,
                &dim_bytes,
                &type_id.to_le_bytes(),
                &offset.to_le_bytes(),
            ]
            .concat(),
        );
        self
    }

    fn data(mut self, bytes: usize) -> Self {
        self.data = (0..bytes).map(|i| i as u8).collect();
        self
    }

    pub(crate) fn bytes(&self) -> Vec<u8> {
        let mut file = b"GGUF".to_vec();
        file.extend(3_u32.to_le_bytes());
        file.extend((self.tensors.len() as u64).to_le_bytes());
        file.extend((self.entries.len() as u64).to_le_bytes());
        file.extend(self.entries.concat());
        file.extend(self.tensors.concat());
        file.resize(file.len().next_multiple_of(32), 0);
        file.extend(&self.data);
        file
    }

    pub(crate) fn parse(&self) -> Result<Gguf, GgufError> {
        Gguf::from_bytes(self.bytes())
    }
}

fn sample() -> Writer {
    Writer::default()
        .entry("general.architecture", 8, &text("llama"))
        .entry("u8", 0, &[200])
        .entry("i8", 1, &[0xFF])
        .entry("u16", 2, &513_u16.to_le_bytes())
        .entry("i16", 3, &(-2_i16).to_le_bytes())
        .entry("u32", 4, &70_000_u32.to_le_bytes())
        .entry("i32", 5, &(-3_i32).to_le_bytes())
        .entry("f32", 6, &1.5_f32.to_le_bytes())
        .entry("bool", 7, &[1])
        .entry("u64", 10, &(1_u64 << 40).to_le_bytes())
        .entry("i64", 11, &(-4_i64).to_le_bytes())
        .entry("f64", 12, &2.5_f64.to_le_bytes())
        .strings("words", &["a", "", "漢字"])
        .array("ints", 5, 2, &[1, 0, 0, 0, 2, 0, 0, 0])
        .array("flags", 7, 3, &[0, 1, 1])
        .array("nested", 9, 1, &[0, 0, 0, 0, 2, 0, 0, 0, 0, 0, 0, 0, 7, 8])
        .tensor("a", &[32, 2], 8, 0)
        .tensor("b", &[3], 0, 96)
        .data(108)
}

#[test]
fn every_value_type_is_read() {
    let gguf = sample().parse().unwrap();
    let ints: Vec<i64> = ["u8", "i8", "u16", "i16", "u32", "i32", "u64", "i64"]
        .iter()
        .map(|key| gguf.require(key).unwrap())
        .collect();
    assert_eq!(ints, [200, -1, 513, -2, 70_000, -3, 1 << 40, -4]);
    assert_eq!(gguf.require::<f32>("f32").unwrap(), 1.5);
    assert_eq!(gguf.require::<f64>("f64").unwrap(), 2.5);
    assert!(gguf.require::<bool>("bool").unwrap());
    assert_eq!(
        gguf.require::<&str>("general.architecture").unwrap(),
        "llama"
    );
    let words: &StringArray = gguf.require("words").unwrap();
    assert_eq!(words.iter().collect::<Vec<_>>(), ["a", "", "漢字"]);
    assert_eq!((words.get(2), words.get(3)), (Some("漢字"), None));
    assert_eq!(gguf.require::<&[i32]>("ints").unwrap(), [1, 2]);
    assert_eq!(
        gguf.metadata("flags"),
        Some(&Value::Array(Array::Bool(vec![false, true, true])))
    );
    let nested = Array::Array(vec![Array::U8(vec![7, 8])]);
    assert_eq!(gguf.metadata("nested"), Some(&Value::Array(nested)));
    assert_eq!(gguf.entries().len(), 16);
}

#[test]
fn tensors_have_absolute_offsets_and_lengths_inside_the_file() {
    let gguf = sample().parse().unwrap();
    let (a, b) = (gguf.tensor("a").unwrap(), gguf.tensor("b").unwrap());
    assert_eq!(
        (a.byte_len, a.num_elements(), a.offset),
        (68, 64, gguf.data_offset())
    );
    assert_eq!((b.byte_len, b.offset), (12, gguf.data_offset() + 96));
    assert_eq!(gguf.tensor_data(b), (96..108).collect::<Vec<u8>>());
    assert_eq!(b.offset + b.byte_len, gguf.file_len());
}

#[test]
fn typed_getters_name_the_key_and_what_is_wrong() {
    let gguf = sample().parse().unwrap();
    let missing = gguf.require::<u32>("absent").unwrap_err().to_string();
    let wrong = gguf.require::<u32>("bool").unwrap_err().to_string();
    let range = gguf.require::<u32>("i8").unwrap_err().to_string();
    assert_eq!(missing, "metadata key \"absent\" is missing");
    assert_eq!(wrong, "metadata key \"bool\" is of type bool, expected u32");
    assert_eq!(range, "metadata key \"i8\" is -1, out of range for u32");
    assert!(gguf.get::<u32>("absent").unwrap().is_none());
}

#[test]
fn a_count_beyond_the_file_is_refused_before_anything_is_allocated() {
    for (type_id, count) in [
        (0, 1 << 60),
        (8, 1 << 60),
        (9, u64::MAX),
        (12, 1 << 61),
        (7, u64::MAX),
    ] {
        let error = Writer::default()
            .array("big", type_id, count, &[])
            .parse()
            .unwrap_err();
        assert!(
            matches!(error, GgufError::CountTooLarge { count: c, .. } if c == count),
            "{error}"
        );
        assert!(error.to_string().contains("\"big\""));
    }
    for (at, what) in [(8, "tensor count"), (16, "metadata count")] {
        let mut bytes = sample().bytes();
        bytes[at..at + 8].copy_from_slice(&(1_u64 << 60).to_le_bytes());
        let error = Gguf::from_bytes(bytes).unwrap_err();
        assert!(
            matches!(error, GgufError::CountTooLarge { .. }) && error.to_string().contains(what),
            "{error}"
        );
    }
}

#[test]
fn a_string_longer_than_the_file_is_refused() {
    let mut bytes = Writer::default().entry("k", 8, &text("v")).bytes();
    bytes[24..32].copy_from_slice(&u64::MAX.to_le_bytes());
    assert!(matches!(
        Gguf::from_bytes(bytes),
        Err(GgufError::Truncated {
            needed: u64::MAX,
            offset: 32,
            ..
        })
    ));
}

#[test]
fn a_tensor_outside_the_file_is_refused() {
    let at = |offset| {
        Writer::default()
            .tensor("t", &[4], 0, offset)
            .data(16)
            .parse()
    };
    assert!(at(0).is_ok());
    for offset in [32, 1 << 40, u64::MAX - 31] {
        assert!(
            matches!(at(offset), Err(GgufError::OutsideFile { .. })),
            "{offset}"
        );
    }
    assert!(matches!(
        at(4),
        Err(GgufError::Misaligned {
            offset: 4,
            alignment: 32,
            ..
        })
    ));
}

#[test]
fn tensors_that_share_bytes_are_refused() {
    let pair = |offsets: [u64; 2]| {
        Writer::default()
            .tensor("first", &[10], 0, offsets[0])
            .tensor("second", &[10], 0, offsets[1])
            .data(128)
            .parse()
    };
    assert!(pair([0, 64]).is_ok() && pair([64, 0]).is_ok());
    for offsets in [[0, 32], [32, 0], [32, 32]] {
        let error = pair(offsets).unwrap_err();
        assert!(
            matches!(error, GgufError::Overlap { offset: 32, .. }),
            "{error}"
        );
        assert!(error.to_string().contains("first") && error.to_string().contains("second"));
    }
}

#[test]
fn super_blocks_are_counted_by_rows() {
    for (type_id, bytes) in [(10, 84), (11, 110), (12, 144), (13, 176), (14, 210)] {
        let shape = |row| {
            Writer::default()
                .tensor("t", &[row, 3, 2], type_id, 0)
                .data(4096)
                .parse()
        };
        let gguf = shape(512).unwrap();
        assert_eq!(gguf.tensors()[0].byte_len, 2 * 3 * 2 * bytes);
        assert!(matches!(
            shape(288),
            Err(GgufError::RowNotDivisible {
                row: 288,
                block: 256,
                ..
            })
        ));
    }
}

#[test]
fn tensor_shapes_that_make_no_sense_are_refused() {
    let shape = |dims: &[u64], type_id| {
        Writer::default()
            .tensor("t", dims, type_id, 0)
            .data(64)
            .parse()
    };
    assert!(matches!(
        shape(&[1 << 33, 1 << 33], 0),
        Err(GgufError::SizeOverflow { .. })
    ));
    assert!(matches!(
        shape(&[1 << 62, 2], 0),
        Err(GgufError::SizeOverflow { .. })
    ));
    assert!(matches!(
        shape(&[1, 1, 1, 1, 1], 0),
        Err(GgufError::TooManyDims { num_dims: 5, .. })
    ));
    assert!(matches!(
        shape(&[4, 0], 0),
        Err(GgufError::ZeroDim { position: 1, .. })
    ));
    assert!(matches!(
        shape(&[31], 8),
        Err(GgufError::RowNotDivisible {
            row: 31,
            block: 32,
            ..
        })
    ));
    assert!(matches!(
        shape(&[4], 4),
        Err(GgufError::UnknownTensorType { type_id: 4, .. })
    ));
}

#[test]
fn broken_headers_say_what_is_wrong_with_them() {
    let refuse = |writer: Writer| writer.parse().unwrap_err();
    assert!(matches!(
        refuse(sample().entry("u8", 0, &[1])),
        GgufError::DuplicateKey { .. }
    ));
    assert!(matches!(
        refuse(sample().tensor("a", &[1], 0, 0)),
        GgufError::DuplicateTensor { .. }
    ));
    assert!(matches!(
        refuse(sample().entry("x", 13, &[])),
        GgufError::UnknownValueType { type_id: 13, .. }
    ));
    assert!(matches!(
        refuse(sample().entry("x", 7, &[2])),
        GgufError::BadBool { value: 2, .. }
    ));
    let alignment = |n: u32| sample().entry("general.alignment", 4, &n.to_le_bytes());
    assert!(matches!(
        refuse(alignment(0)),
        GgufError::BadAlignment { alignment: 0 }
    ));
    assert!(matches!(
        refuse(alignment(24)),
        GgufError::BadAlignment { alignment: 24 }
    ));
    assert!(alignment(16).parse().is_ok());
    let not_utf8 = [&2_u64.to_le_bytes()[..], &[0xFF, 0xFE]].concat();
    assert!(matches!(
        refuse(Writer::default().entry("x", 8, &not_utf8)),
        GgufError::NotUtf8 { .. }
    ));
}

#[test]
fn arrays_nested_without_end_are_refused() {
    let mut value = Vec::new();
    for _ in 0..100_000 {
        value.extend(9_u32.to_le_bytes());
        value.extend(1_u64.to_le_bytes());
    }
    let error = Writer::default()
        .entry("deep", 9, &value)
        .parse()
        .unwrap_err();
    assert!(matches!(
        error,
        GgufError::NestedTooDeep {
            limit: MAX_ARRAY_DEPTH,
            ..
        }
    ));
}

#[test]
fn foreign_files_are_told_apart() {
    let parse = |bytes: &[u8]| Gguf::from_bytes(bytes.to_vec()).unwrap_err();
    assert!(matches!(parse(b""), GgufError::Truncated { .. }));
    assert!(matches!(
        parse(b"PK\x03\x04...."),
        GgufError::BadMagic { .. }
    ));
    assert!(matches!(
        parse(b"GGUF\x01\0\0\0"),
        GgufError::UnsupportedVersion { version: 1 }
    ));
    assert!(matches!(parse(b"GGUF\0\0\0\x03"), GgufError::BigEndian));
}

#[test]
fn a_file_cut_anywhere_is_an_error_and_never_a_panic() {
    let bytes = sample().bytes();
    for len in 0..bytes.len() {
        assert!(Gguf::from_bytes(bytes[..len].to_vec()).is_err(), "{len}");
    }
}

#[test]
fn opening_a_missing_or_an_empty_file_is_an_error_that_names_it() {
    let error = Gguf::open("/nonexistent/model.gguf").unwrap_err();
    assert!(error.to_string().contains("/nonexistent/model.gguf"));
    let path = std::env::temp_dir().join(format!("octavo-gguf-{}.gguf", std::process::id()));
    std::fs::write(&path, b"").unwrap();
    assert!(matches!(
        Gguf::open(&path),
        Err(GgufError::Truncated { .. })
    ));
    std::fs::write(&path, sample().bytes()).unwrap();
    assert_eq!(
        Gguf::open(&path).unwrap().tensors(),
        sample().parse().unwrap().tensors()
    );
    std::fs::remove_file(path).unwrap();
}

/// All that a successful parse promises.
fn check_promises(gguf: &Gguf) {
    for tensor in gguf.tensors() {
        assert!(tensor.offset >= gguf.data_offset());
        assert!(tensor.offset + tensor.byte_len <= gguf.file_len());
        assert_eq!(gguf.tensor_data(tensor).len() as u64, tensor.byte_len);
        for other in gguf.tensors() {
            let apart = tensor.offset + tensor.byte_len <= other.offset
                || other.offset + other.byte_len <= tensor.offset;
            assert!(apart || std::ptr::eq(tensor, other));
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    #[test]
    fn mutated_headers_are_errors_or_consistent(
        edits in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..4),
        words in prop::collection::vec((any::<prop::sample::Index>(), prop_oneof![
            Just(u64::MAX), Just(1 << 60), Just(1 << 32), Just(0), any::<u64>()]), 0..2),
        cut in any::<prop::sample::Index>(),
        truncate in prop::bool::weighted(0.2),
    ) {
        let mut bytes = sample().bytes();
        for (at, value) in edits {
            let at = at.index(bytes.len());
            bytes[at] = value;
        }
        for (at, value) in words {
            let at = at.index(bytes.len() - 8);
            bytes[at..at + 8].copy_from_slice(&value.to_le_bytes());
        }
        if truncate {
            bytes.truncate(cut.index(bytes.len()));
        }
        if let Ok(gguf) = Gguf::from_bytes(bytes) {
            check_promises(&gguf);
        }
    }

    #[test]
    fn random_bytes_behind_a_valid_start_are_errors_or_consistent(
        tail in prop::collection::vec(any::<u8>(), 0..200), entries in 0..3_u64, tensors in 0..3_u64,
    ) {
        let counts = [tensors.to_le_bytes(), entries.to_le_bytes()].concat();
        let bytes = [&b"GGUF\x03\0\0\0"[..], &counts, &tail].concat();
        if let Ok(gguf) = Gguf::from_bytes(bytes) {
            check_promises(&gguf);
        }
    }
}
