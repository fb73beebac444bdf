//! The tokenizer as llguidance sees it: the bytes of every token in a trie.

use std::sync::Arc;

use llguidance::ParserFactory;
use octavo_text::Tokenizer;
use toktrie::{InferenceCapabilities, TokRxInfo, TokTrie, TokenId, TokenizerEnv};

use crate::compiler::GrammarError;
use crate::limits;

/// Tokens that no text is made of begin with this byte, so that no grammar over text allows them.
const SPECIAL: u8 = TokTrie::SPECIAL_TOKEN_MARKER;

/// What the masks are made for.
#[derive(Clone, Debug)]
pub struct Vocabulary {
    /// The bytes of the tokens.
    pub tokenizer: Arc<Tokenizer>,
    /// Ids of the model; it may be more or fewer than the tokenizer has.
    pub vocab_size: u32,
    /// Ids that end an output; allowed where the grammar may end.
    pub eos_token_ids: Vec<u32>,
}

impl Vocabulary {
    /// The trie and everything that is derived from it; takes a fraction of a second.
    pub(crate) fn factory(&self) -> Result<ParserFactory, GrammarError> {
        let mut eos = self.eos_token_ids.clone();
        eos.retain(|&id| id < self.vocab_size);
        let Some(&first) = eos.first() else {
            return Err(GrammarError::NoEndOfSequence);
        };
        let words: Vec<Vec<u8>> = (0..self.vocab_size).map(|id| self.word(id)).collect();
        let info = TokRxInfo::new(self.vocab_size, first);
        let trie = TokTrie::from(&info, &words).with_eos_tokens(&eos);
        let environment: toktrie::TokEnv = Arc::new(Environment { trie });
        let slices = llguidance::earley::SlicedBiasComputer::general_slices();
        let capabilities = InferenceCapabilities::default();
        let mut factory = ParserFactory::new(&environment, capabilities, &slices)
            .map_err(|error| GrammarError::invalid(&error))?;
        factory.quiet();
        *factory.limits_mut() = limits::parser();
        Ok(factory)
    }

    fn word(&self, id: u32) -> Vec<u8> {
        let bytes = self.tokenizer.token_bytes(id).unwrap_or_default();
        // A token that is an end of sequence is no text, whatever the tokenizer calls it.
        if self.tokenizer.is_special(id) || self.eos_token_ids.contains(&id) {
            [&[SPECIAL], bytes].concat()
        } else {
            bytes.to_vec()
        }
    }
}

struct Environment {
    trie: TokTrie,
}

impl TokenizerEnv for Environment {
    fn tok_trie(&self) -> &TokTrie {
        &self.trie
    }

    fn tokenize_bytes(&self, bytes: &[u8]) -> Vec<TokenId> {
        self.trie.greedy_tokenize(bytes)
    }

    /// The masks leave the model its own way of cutting a text.
    fn tokenize_is_canonical(&self) -> bool {
        false
    }
}
