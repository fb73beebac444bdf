//! `EngineCore`, `Mailbox` and updates.

use std::sync::Arc;
use std::time::Duration;

use numpy::{
    PyArray1, PyArray2, PyArrayMethods, PyReadonlyArray1, PyReadonlyArray2, PyReadonlyArray3,
    PyReadwriteArray1, PyUntypedArrayMethods,
};
use octavo_core::config::{self, CacheGroup, CoreConfig};
use octavo_core::ids::{Namespace, RequestId, StepId, TenantId};
use octavo_core::output::StepResults;
use octavo_core::params::{Limits, Pooling, SamplingParams};
use octavo_core::plan;
use octavo_engine::engine::{Engine, Extras, Pooled, PromptLogprobs, StepLogprobs, Submission};
use octavo_engine::mailbox;
use octavo_engine::update::{self, Finish, PositionLogprobs};
use octavo_text::detokenizer::TextStart;
use octavo_text::output::TextOptions;
use octavo_text::stop::{StopError, StopSet};
use pyo3::IntoPyObjectExt;
use pyo3::exceptions::{PyRuntimeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::grammar::PyGrammarSource;
use crate::text::PyTokenizer;

/// `(ids, log-probabilities, rank)` of one position.
type Position = (Vec<u32>, Vec<f32>, u32);

/// Attributes of `octavo.SamplingParams` that the engine needs, read by name.
#[derive(FromPyObject)]
struct Params {
    n: u32,
    seed: i64,
    temperature: f32,
    top_k: i64,
    top_p: f32,
    min_p: f32,
    presence_penalty: f32,
    frequency_penalty: f32,
    repetition_penalty: f32,
    max_tokens: u32,
    min_tokens: u32,
    ignore_eos: bool,
    stop: Vec<String>,
    stop_token_ids: Vec<u32>,
    logprobs: Option<i64>,
    prompt_logprobs: Option<i64>,
    logit_bias: Option<std::collections::BTreeMap<u32, f32>>,
    allowed_token_ids: Option<Vec<u32>>,
    include_stop_str_in_output: bool,
    skip_special_tokens: bool,
    detokenize: bool,
}

impl Params {
    fn text_options(&self, mut shown_special_ids: Vec<u32>) -> Result<TextOptions, StopError> {
        shown_special_ids.sort_unstable();
        Ok(TextOptions {
            shown_special_ids: shown_special_ids.into(),
            stop: if self.stop.is_empty() {
                None
            } else {
                Some(Arc::new(StopSet::new(&self.stop)?))
            },
            include_stop_str_in_output: self.include_stop_str_in_output,
            min_tokens: self.min_tokens as usize,
            skip_special_tokens: self.skip_special_tokens,
            start: TextStart::Continuation,
        })
    }

    fn resolve(
        self,
        eos_token_ids: Vec<u32>,
        bad_words: Vec<Vec<u32>>,
        vocab_size: u32,
        pooling: Option<Pooling>,
    ) -> SamplingParams {
        // −1 asks for the whole vocabulary.
        let count = |top: i64| u32::try_from(top).unwrap_or(vocab_size);
        SamplingParams {
            n: self.n,
            seed: self.seed.cast_unsigned(),
            temperature: self.temperature,
            top_k: u32::try_from(self.top_k).unwrap_or(0),
            top_p: self.top_p,
            min_p: self.min_p,
            presence_penalty: self.presence_penalty,
            frequency_penalty: self.frequency_penalty,
            repetition_penalty: self.repetition_penalty,
            max_tokens: self.max_tokens,
            min_tokens: self.min_tokens,
            ignore_eos: self.ignore_eos,
            stop_token_ids: self.stop_token_ids,
            eos_token_ids,
            logprobs: self.logprobs.map(count),
            prompt_logprobs: self.prompt_logprobs.map(count),
            logit_bias: self.logit_bias.unwrap_or_default().into_iter().collect(),
            bad_words,
            allowed_token_ids: self.allowed_token_ids.unwrap_or_default(),
            pooling,
        }
    }
}

/// Where one caller waits for news of its requests.
#[pyclass(name = "Mailbox", module = "octavo._core", frozen)]
pub(crate) struct PyMailbox {
    engine: Arc<Engine>,
    inner: Arc<mailbox::Mailbox>,
}

#[pymethods]
impl PyMailbox {
    /// Waits at most `timeout` seconds, without the GIL, and returns the updates of the requests that have news.
    fn receive(&self, py: Python<'_>, timeout: f64) -> Vec<PyUpdate> {
        let timeout = Duration::from_secs_f64(timeout.clamp(0.0, 3600.0));
        let updates = py.detach(|| self.engine.receive(&self.inner, timeout));
        updates.into_iter().map(PyUpdate::from).collect()
    }
}

/// What one choice gained since the last update.
#[pyclass(name = "ChoiceUpdate", module = "octavo._core", frozen, get_all)]
pub(crate) struct PyChoiceUpdate {
    index: u32,
    text: String,
    token_ids: Vec<u32>,
    logprobs: Vec<Position>,
    text_offsets: Vec<usize>,
    finish_reason: Option<&'static str>,
    stop_reason: Option<Py<PyAny>>,
}

/// What one request gained since the last update.
#[pyclass(name = "Update", module = "octavo._core", frozen)]
pub(crate) struct PyUpdate(update::Update);

fn position(scores: &PositionLogprobs) -> Position {
    (scores.ids.clone(), scores.values.clone(), scores.rank)
}

impl From<update::Update> for PyUpdate {
    fn from(update: update::Update) -> Self {
        Self(update)
    }
}

#[pymethods]
impl PyUpdate {
    #[getter]
    fn request_id(&self) -> u64 {
        self.0.id.0
    }

    #[getter]
    fn num_cached_tokens(&self) -> u32 {
        self.0.num_cached_tokens
    }

    #[getter]
    fn finished(&self) -> bool {
        self.0.finished
    }

    #[getter]
    fn error(&self) -> Option<&str> {
        self.0.error.as_deref()
    }

    #[getter]
    fn prompt_logprobs(&self) -> Option<Vec<Option<Position>>> {
        let positions = self.0.prompt_logprobs.as_ref()?;
        Some(positions.iter().map(|p| p.as_ref().map(position)).collect())
    }

    #[getter]
    fn pooled(&self) -> Option<Vec<f32>> {
        self.0.pooled.clone()
    }

    #[getter]
    fn choices(&self, py: Python<'_>) -> PyResult<Vec<PyChoiceUpdate>> {
        self.0
            .choices
            .iter()
            .map(|choice| choice_update(py, choice))
            .collect()
    }
}

fn choice_update(py: Python<'_>, choice: &update::ChoiceUpdate) -> PyResult<PyChoiceUpdate> {
    let stop_reason = match &choice.finish {
        Some(Finish::StopToken(token)) => Some(token.into_py_any(py)?),
        Some(Finish::StopString(text)) => Some(text.into_py_any(py)?),
        _ => None,
    };
    Ok(PyChoiceUpdate {
        index: choice.index,
        text: choice.text.clone(),
        token_ids: choice.token_ids.clone(),
        logprobs: choice.logprobs.iter().map(position).collect(),
        text_offsets: choice.text_offsets.clone(),
        finish_reason: choice.finish.as_ref().map(Finish::reason),
        stop_reason,
    })
}

/// The control plane. Methods that wait or work let go of the GIL.
#[pyclass(name = "EngineCore", module = "octavo._core", frozen)]
pub(crate) struct PyEngineCore {
    engine: Arc<Engine>,
}

/// Scores of prompt tokens as Python gives them: `(row, start, ids [n, w], logprobs [n, w], ranks [n])`.
type PromptScores<'py> = (
    u32,
    usize,
    PyReadonlyArray2<'py, i32>,
    PyReadonlyArray2<'py, f32>,
    PyReadonlyArray1<'py, i32>,
);

impl PyEngineCore {
    pub(crate) fn share(&self) -> Arc<Engine> {
        Arc::clone(&self.engine)
    }
}

#[pymethods]
impl PyEngineCore {
    #[new]
    #[pyo3(signature = (*, block_size, num_blocks, max_num_seqs, max_num_batched_tokens, max_model_len, max_in_flight,
        vocab_size, enable_prefix_caching, host_state, group_windows, bytes_per_block, max_logprobs, tokenizer=None, max_draft_tokens=0,
        eos_token_ids=Vec::new()))]
    #[expect(
        clippy::too_many_arguments,
        reason = "keyword arguments of the Python constructor"
    )]
    fn new(
        block_size: u32,
        num_blocks: u32,
        max_num_seqs: u32,
        max_num_batched_tokens: u32,
        max_model_len: u32,
        max_in_flight: u32,
        vocab_size: u32,
        enable_prefix_caching: bool,
        host_state: bool,
        group_windows: Vec<Option<u32>>,
        bytes_per_block: u64,
        max_logprobs: i64,
        tokenizer: Option<&PyTokenizer>,
        max_draft_tokens: u32,
        eos_token_ids: Vec<u32>,
    ) -> PyResult<Self> {
        let config = CoreConfig {
            block_size,
            num_blocks,
            max_num_seqs,
            max_num_batched_tokens,
            max_model_len,
            max_in_flight,
            max_draft_tokens,
            enable_prefix_caching,
            vocab_size,
            host_state,
            groups: cache_groups(&group_windows),
            bytes_per_block,
            ..CoreConfig::default()
        };
        let max_logprobs = u32::try_from(max_logprobs).unwrap_or(vocab_size);
        let limits = Limits {
            max_logprobs,
            ..Limits::default()
        };
        let engine = Engine::new(
            config,
            limits,
            tokenizer.map(PyTokenizer::share),
            eos_token_ids,
        )
        .map_err(value_error)?;
        Ok(Self {
            engine: Arc::new(engine),
        })
    }

    /// The most blocks that one request of `num_tokens` tokens holds at any time; `add` refuses what needs more than there are.
    #[staticmethod]
    fn blocks_per_request(
        num_tokens: u32,
        block_size: u32,
        group_windows: Vec<Option<u32>>,
        max_num_batched_tokens: u32,
        max_in_flight: u32,
    ) -> PyResult<u64> {
        if block_size == 0 || group_windows.contains(&Some(0)) {
            return Err(PyValueError::new_err(format!(
                "block_size = {block_size} and the windows {group_windows:?} must be at least 1"
            )));
        }
        Ok(config::blocks_per_request(
            num_tokens,
            block_size,
            &cache_groups(&group_windows),
            max_num_batched_tokens,
            max_in_flight,
        ))
    }

    /// Words of a plan and the offsets of its per-row parts.
    fn plan_offsets<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        crate::plan::offsets(py, &plan::Layout::new(self.engine.config()))
    }

    /// A place to wait for updates.
    fn mailbox(&self) -> PyMailbox {
        PyMailbox {
            engine: Arc::clone(&self.engine),
            inner: Arc::default(),
        }
    }

    #[pyo3(signature = (prompt, params, mailbox, *, eos_token_ids, bad_words, priority=0, tenant=0, namespace=0, stream=false,
        shown_special_ids=Vec::new(), grammar=None, pooling=None))]
    #[expect(
        clippy::too_many_arguments,
        reason = "keyword arguments of the Python method"
    )]
    fn add(
        &self,
        py: Python<'_>,
        prompt: Vec<u32>,
        params: Params,
        mailbox: &PyMailbox,
        eos_token_ids: Vec<u32>,
        bad_words: Vec<Vec<u32>>,
        priority: i32,
        tenant: u64,
        namespace: u64,
        stream: bool,
        shown_special_ids: Vec<u32>,
        grammar: Option<&PyGrammarSource>,
        pooling: Option<&str>,
    ) -> PyResult<u64> {
        let pooling = pooling.map(parse_pooling).transpose()?;
        let vocab_size = self.engine.config().vocab_size;
        let submission = Submission {
            num_prompt_tokens: prompt.len() as u32,
            tokens: prompt,
            first_choice: 0,
            detokenize: params.detokenize,
            text: params
                .text_options(shown_special_ids)
                .map_err(value_error)?,
            params: params.resolve(eos_token_ids, bad_words, vocab_size, pooling),
            priority,
            tenant: TenantId(tenant),
            namespace: Namespace(namespace),
            stream,
            grammar: grammar.map(|grammar| Arc::clone(&grammar.0)),
        };
        py.detach(|| self.engine.add(submission, &mailbox.inner))
            .map(|id| id.0)
            .map_err(value_error)
    }

    /// Compiles a grammar and keeps it for the requests that will have it.
    fn check_grammar(&self, py: Python<'_>, grammar: &PyGrammarSource) -> PyResult<()> {
        py.detach(|| self.engine.check_grammar(Arc::clone(&grammar.0)))
            .map_err(value_error)
    }

    fn abort(&self, py: Python<'_>, request_id: u64) {
        py.detach(|| self.engine.abort(RequestId(request_id)));
    }

    fn wait(&self, py: Python<'_>) {
        py.detach(|| self.engine.wait());
    }

    /// Writes the next plan into `buffer`; False if there is nothing to schedule.
    fn schedule(&self, py: Python<'_>, mut buffer: PyReadwriteArray1<'_, i32>) -> PyResult<bool> {
        let words = buffer.as_slice_mut()?;
        Ok(py.detach(|| self.engine.schedule(words)).is_some())
    }

    /// The masks of a step in flight, int32 `[num_rows, ceil(V / 32)]`; waits for those that are being made.
    fn masks<'py>(
        &self,
        py: Python<'py>,
        step_id: u64,
        num_rows: usize,
    ) -> PyResult<Bound<'py, PyArray2<i32>>> {
        let masks = py.detach(|| self.engine.masks(StepId(step_id), num_rows));
        let width = self.engine.config().vocab_size.div_ceil(32) as usize;
        PyArray1::from_vec(py, masks).reshape([num_rows, width])
    }

    #[pyo3(signature = (step_id, tokens, num_sampled, next_drafts=None, logprob_ids=None, logprobs=None, logprob_ranks=None,
        prompt_logprobs=None, pooled=None))]
    #[expect(
        clippy::too_many_arguments,
        reason = "the fields of StepResult, in order"
    )]
    fn commit(
        &self,
        py: Python<'_>,
        step_id: u64,
        tokens: PyReadonlyArray2<'_, i32>,
        num_sampled: PyReadonlyArray1<'_, i32>,
        next_drafts: Option<PyReadonlyArray2<'_, i32>>,
        logprob_ids: Option<PyReadonlyArray3<'_, i32>>,
        logprobs: Option<PyReadonlyArray3<'_, f32>>,
        logprob_ranks: Option<PyReadonlyArray2<'_, i32>>,
        prompt_logprobs: Option<Vec<PromptScores<'_>>>,
        pooled: Option<Vec<(u32, PyReadonlyArray1<'_, f32>)>>,
    ) -> PyResult<()> {
        let results = StepResults {
            step_id: StepId(step_id),
            tokens: tokens.as_slice()?,
            num_sampled: num_sampled.as_slice()?,
            next_drafts: next_drafts
                .as_ref()
                .map(|drafts| drafts.as_slice())
                .transpose()?,
        };
        let scores = match (&logprob_ids, &logprobs, &logprob_ranks) {
            (Some(ids), Some(values), Some(ranks)) => Some(StepLogprobs {
                width: ids.shape()[2],
                ids: ids.as_slice()?,
                values: values.as_slice()?,
                ranks: ranks.as_slice()?,
            }),
            _ => None,
        };
        let given = prompt_logprobs.unwrap_or_default();
        let mut prompt_scores = Vec::with_capacity(given.len());
        for (row, start, ids, values, ranks) in &given {
            let scores = StepLogprobs {
                width: ids.shape()[1],
                ids: ids.as_slice()?,
                values: values.as_slice()?,
                ranks: ranks.as_slice()?,
            };
            prompt_scores.push(PromptLogprobs {
                row: *row,
                start: *start,
                scores,
            });
        }
        let vectors = pooled.unwrap_or_default();
        let mut pooled = Vec::with_capacity(vectors.len());
        for (row, vector) in &vectors {
            let vector = vector.as_slice()?;
            pooled.push(Pooled { row: *row, vector });
        }
        let extras = Extras {
            logprobs: scores,
            prompt_logprobs: &prompt_scores,
            pooled: &pooled,
        };
        py.detach(|| self.engine.commit(results, extras))
            .map_err(runtime_error)
    }

    fn pause(&self, py: Python<'_>) {
        py.detach(|| self.engine.pause());
    }

    fn resume(&self) {
        self.engine.resume();
    }

    fn reset_prefix_cache(&self, py: Python<'_>) {
        py.detach(|| self.engine.reset_prefix_cache());
    }

    /// Counters of the control plane, by name.
    fn stats<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let stats = py.detach(|| self.engine.stats());
        let named = [
            ("num_running", stats.num_running as f64),
            ("num_waiting", stats.num_waiting as f64),
            ("num_blocks", f64::from(stats.num_blocks)),
            ("free_blocks", f64::from(stats.free_blocks)),
            ("evictable_blocks", f64::from(stats.evictable_blocks)),
            ("cached_blocks", f64::from(stats.cached_blocks)),
            ("coming_blocks", f64::from(stats.coming_blocks)),
            ("used_bytes", stats.used_bytes as f64),
            ("allocated_tokens", stats.allocated_tokens as f64),
            ("filled_tokens", stats.filled_tokens as f64),
            ("query_tokens", stats.query_tokens as f64),
            ("hit_tokens", stats.hit_tokens as f64),
            ("generation_tokens", stats.generation_tokens as f64),
            ("preemptions", stats.preemptions as f64),
        ];
        PyDict::from_sequence(&named.into_pyobject(py)?)
    }

    fn check_integrity(&self, py: Python<'_>) -> PyResult<()> {
        py.detach(|| self.engine.check_integrity())
            .map_err(PyRuntimeError::new_err)
    }

    fn shut_down(&self, py: Python<'_>) {
        py.detach(|| self.engine.shut_down());
    }

    fn fail(&self, py: Python<'_>, reason: &str) {
        py.detach(|| self.engine.fail(reason));
    }

    fn is_shut_down(&self) -> bool {
        self.engine.is_shut_down()
    }
}

fn cache_groups(windows: &[Option<u32>]) -> Vec<CacheGroup> {
    let group = |window: &Option<u32>| {
        window.map_or(CacheGroup::Full, |window| CacheGroup::Window { window })
    };
    windows.iter().map(group).collect()
}

fn parse_pooling(name: &str) -> PyResult<Pooling> {
    match name {
        "last" => Ok(Pooling::Last),
        "mean" => Ok(Pooling::Mean),
        other => Err(value_error(format!(
            "pooling = {other:?} must be last or mean"
        ))),
    }
}

fn value_error(error: impl std::fmt::Display) -> PyErr {
    PyValueError::new_err(error.to_string())
}

fn runtime_error(error: impl std::fmt::Display) -> PyErr {
    PyRuntimeError::new_err(error.to_string())
}
