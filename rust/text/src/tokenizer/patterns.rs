//! The splitting rules that `tokenizer.ggml.pre` names: regular expressions applied one after the other, each of which
//! cuts the pieces of the one before into its matches and the gaps between them. The names are those of ggml's converter.

/// Splitting and merging rules of one family of byte-level BPE tokenizers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Rules {
    pub(super) patterns: &'static [&'static str],
    /// A piece that is a token of the vocabulary is not merged from its bytes.
    pub(super) ignore_merges: bool,
    /// Whether a text begins with BOS unless the file says otherwise.
    pub(super) add_bos: bool,
}

pub(super) const GPT2: &str =
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+";
const DIGIT: &str = r"\p{N}";
const LLAMA3: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const QWEN2: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const GPT4O: &str = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const TEKKEN: &str = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const DEEPSEEK3: &str = r##"[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"##;

/// Every supported name with its rules.
const FAMILIES: &[(&[&str], Rules)] = &[
    (
        &[
            "gpt-2",
            "phi-2",
            "jina-es",
            "jina-de",
            "jina-v2-es",
            "jina-v2-de",
            "jina-v2-code",
            "roberta-bpe",
            "mpt",
            "olmo",
            "jais",
        ],
        plain(&[GPT2]),
    ),
    (
        &["smollm", "starcoder", "refact", "command-r", "codeshell"],
        plain(&[DIGIT, GPT2]),
    ),
    (
        &["llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral"],
        Rules {
            patterns: &[LLAMA3],
            ignore_merges: true,
            add_bos: true,
        },
    ),
    (
        &["dbrx", "smaug-bpe", "chatglm-bpe", "glm4"],
        plain(&[LLAMA3]),
    ),
    (
        &[
            "qwen2",
            "stablelm2",
            "deepseek-r1-qwen",
            "megrez",
            "hunyuan",
        ],
        plain(&[QWEN2]),
    ),
    (&["gpt-4o", "llama4"], plain(&[GPT4O])),
    (
        &["tekken"],
        Rules {
            patterns: &[TEKKEN],
            ignore_merges: true,
            add_bos: true,
        },
    ),
    (
        &["deepseek-v3"],
        plain(&[r"\p{N}{1,3}", r"[一-龥぀-ゟ゠-ヿ]+", DEEPSEEK3]),
    ),
    (
        &["falcon"],
        plain(&[r"[\p{P}\$\+<=>\^~\|`]+", GPT2, r"[0-9][0-9][0-9]"]),
    ),
    (
        &["default"],
        plain(&[r"[\p{P}\$\+<=>\^~\|]+", GPT2, r"\p{N}+", r"[0-9][0-9][0-9]"]),
    ),
];

const fn plain(patterns: &'static [&'static str]) -> Rules {
    Rules {
        patterns,
        ignore_merges: false,
        add_bos: false,
    }
}

/// The rules that `name` stands for.
pub(super) fn rules(name: &str) -> Option<Rules> {
    FAMILIES
        .iter()
        .find(|(names, _)| names.contains(&name))
        .map(|&(_, rules)| rules)
}

/// All supported names, for error messages.
pub(super) fn supported() -> String {
    FAMILIES
        .iter()
        .flat_map(|(names, _)| names.iter().copied())
        .collect::<Vec<_>>()
        .join(", ")
}
