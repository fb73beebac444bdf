//! The model that is served, as far as the front knows it: its tokenizer, its chat format, its limits.

use std::hash::{BuildHasher, RandomState};
use std::path::Path;
use std::sync::Arc;
use std::thread;

use octavo_core::params::Limits;
use octavo_grammar::compiler::{Compiler, GrammarError, TIMEOUT, Vocabulary};
use octavo_text::gguf::Gguf;
use octavo_text::tokenizer::Tokenizer;
use octavo_wire::ModelInfo;
use tokio::sync::oneshot;

use crate::config::ServerConfig;
use crate::engine::RequestGrammar;
use crate::error::ApiError;
use crate::protocol::ChatFormat;

/// Makes another namespace of sequences with the long rotary frequencies. Any number.
const LONG_ROPE: u64 = 0x9E37_79B9_7F4A_7C15;

/// Everything that requests are checked and written with.
#[derive(Debug)]
pub(crate) struct Model {
    pub(crate) info: ModelInfo,
    pub(crate) tokenizer: Option<Arc<Tokenizer>>,
    pub(crate) chat: Option<ChatFormat>,
    pub(crate) limits: Limits,
    /// Says whether a grammar compiles before the engine sees it.
    grammars: Option<Arc<Compiler>>,
    /// Secret and new in every process, so that nobody can choose two salts with one digest.
    digests: RandomState,
}

impl Model {
    /// Reads the tokenizer and compiles the template. Takes up to seconds.
    pub(crate) fn load(info: ModelInfo, config: &ServerConfig) -> Result<Self, String> {
        let tokenizer = match &info.tokenizer {
            None => None,
            Some(path) => Some(Arc::new(load_tokenizer(Path::new(path))?)),
        };
        let chat = match &tokenizer {
            None => None,
            Some(tokenizer) => info
                .chat_template
                .as_deref()
                .or(tokenizer.chat_template())
                .map(|source| {
                    ChatFormat::new(
                        source,
                        tokenizer,
                        &config.tool_call_parser,
                        &config.reasoning_parser,
                    )
                })
                .transpose()?,
        };
        let limits = Limits {
            max_logprobs: info.max_logprobs,
            ..Limits::default()
        };
        let grammars = tokenizer.clone().map(|tokenizer| {
            let compiler = Arc::new(Compiler::bounded(Vocabulary {
                tokenizer,
                vocab_size: info.vocab_size,
                eos_token_ids: info.eos_token_ids.clone(),
            }));
            // Nobody waits for it but the first request with a grammar.
            let preparing = Arc::clone(&compiler);
            thread::spawn(move || preparing.prepare());
            compiler
        });
        Ok(Self {
            grammars,
            info,
            tokenizer,
            chat,
            limits,
            digests: RandomState::new(),
        })
    }

    /// Whether requests that were checked by this model's limits can run in an engine that has loaded `info`.
    pub(crate) fn is_served_by(&self, info: &ModelInfo) -> Result<(), String> {
        if info.max_model_len < self.info.max_model_len {
            return Err(format!(
                "max_model_len = {} of this engine must be at least {}, which requests have been promised: set max_model_len, or the size of the KV cache",
                info.max_model_len, self.info.max_model_len
            ));
        }
        Ok(())
    }

    /// The tokenizer, for a request that needs one.
    pub(crate) fn require_tokenizer(&self) -> Result<&Arc<Tokenizer>, ApiError> {
        self.tokenizer.as_ref().ok_or_else(|| {
            ApiError::invalid(
                "this server runs without a tokenizer: it takes and gives token ids only",
            )
        })
    }

    /// Waits until a grammar is compiled, at most a few seconds; the error names its field.
    pub(crate) async fn check_grammar(&self, grammar: &RequestGrammar) -> Result<(), ApiError> {
        let Some(compiler) = &self.grammars else {
            self.require_tokenizer()?;
            return Ok(());
        };
        let (sender, receiver) = oneshot::channel();
        compiler.request(Arc::clone(&grammar.source), |result| {
            // A client that waits no longer does not listen.
            drop(sender.send(result.map(drop)));
        });
        let result = match tokio::time::timeout(TIMEOUT, receiver).await {
            Ok(Ok(result)) => result,
            _ => Err(GrammarError::TimedOut),
        };
        result.map_err(|error| match error {
            GrammarError::Busy { .. } => ApiError::busy(error.to_string()),
            error => ApiError {
                param: Some(grammar.param.clone()),
                ..ApiError::invalid(format!("{} cannot be used: {error}", grammar.param))
            },
        })
    }

    /// Within it prefixes are shared: by those with the same salt and the same rotary frequencies.
    pub(crate) fn namespace(&self, salt: Option<&str>, num_tokens: usize) -> u64 {
        let salted = salt.map_or(0, |salt| self.digests.hash_one(salt));
        let is_long = |above: u32| num_tokens > above as usize;
        match self.info.long_rope_above {
            Some(above) if is_long(above) => salted ^ LONG_ROPE,
            _ => salted,
        }
    }
}

fn load_tokenizer(path: &Path) -> Result<Tokenizer, String> {
    let loaded = if path
        .extension()
        .is_some_and(|extension| extension == "gguf")
    {
        let gguf = Gguf::open(path).map_err(|error| error.to_string())?;
        Tokenizer::from_gguf(&gguf)
    } else if path.is_dir() {
        Tokenizer::from_dir(path)
    } else {
        Tokenizer::from_file(path)
    };
    loaded.map_err(|error| error.to_string())
}
