//! Filling of the inputs of a decoder's graphs.

use std::any::Any;
use std::fmt;

use serde::Deserialize;

use super::draft_graphs::reads_alone;
use crate::fill::{CausalMask, Embedding, FloatInput, Rope, RopeTables, StepMask};
use crate::state::PositionTrack;
use qhx_op::{Error, GraphId, Host, Result};

/// The graphs that take a number of tokens in one step.
#[derive(Debug, Clone, Copy)]
pub struct GraphVariant<'a> {
    /// Its number: 0 takes one token; the prefill passes follow, the narrowest first, and then those that take as many
    /// tokens in smaller contexts.
    pub index: usize,
    /// The shards, in order.
    pub graphs: &'a [GraphId],
    /// Tokens of a step.
    pub rows: usize,
    /// The graphs write caches and read none: they take the first tokens of a text alone.
    pub begins: bool,
    /// Positions that their caches hold, where these are no rings; 0 without a cache.
    pub capacity: usize,
}

/// The tokens of one step.
#[derive(Debug, Clone, Copy)]
pub struct Chunk<'a> {
    /// Number of the pass that takes them.
    pub pass: usize,
    /// At most as many as the pass has rows. What the graphs give for the rows after them is not
    /// looked at.
    pub tokens: &'a [u32],
    /// Position of the first.
    pub position: usize,
    /// Place of each position for a rotary embedding of three axes.
    pub track: &'a PositionTrack,
    /// Index of the first in the prompt that is being consumed; 0 for a token that is decoded.
    pub index: usize,
    /// Rows that stand in the prompt instead of those of its tokens, in order.
    pub soft: &'a [SoftRows<'a>],
    /// What the tokens see of each other.
    pub sight: Sight,
}

impl<'a> Chunk<'a> {
    /// The soft rows of this step, `hidden` values each, with the row of the step that each one is.
    pub fn soft_rows(self, hidden: usize) -> impl Iterator<Item = (usize, &'a [f32])> {
        let steps = self.index..self.index + self.tokens.len();
        self.soft.iter().flat_map(move |soft| {
            let before = steps.start.saturating_sub(soft.first);
            let rows = soft.values.chunks_exact(hidden.max(1)).enumerate().skip(before);
            let (steps, first) = (steps.clone(), soft.first);
            let places = rows.map(move |(row, values)| (first + row, values));
            let here = places.take_while(move |(place, _)| *place < steps.end);
            here.map(move |(place, values)| (place - self.index, values))
        })
    }
}

/// Hidden states that stand in a prompt instead of those of its tokens: what an image or audio becomes.
#[derive(Debug, Clone, Copy)]
pub struct SoftRows<'a> {
    /// Index in the prompt of the token that the first row stands for.
    pub first: usize,
    /// The rows, one behind the other.
    pub values: &'a [f32],
    /// Tokens from `first` on that see each other, those behind them too, as the tokens of an image do in some models,
    /// or all of a prompt; 0 where none do. One step takes them all and no other tokens.
    pub together: usize,
    /// They see each other beyond the window of layers that slide, as all of a prompt does.
    pub prefix: bool,
}

/// What the tokens of a step see of each other.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Sight {
    /// Those before them.
    #[default]
    Causal,
    /// Those behind them, too, and before them what the window of layers that slide leaves: [`SoftRows::together`].
    Together,
    /// All of them: [`SoftRows::prefix`].
    Prefix,
}

/// Fills inputs of a decoder's graphs. Ropes, masks and the embedding are the kit's; an op may bring
/// others.
pub trait Filler: Any + fmt::Debug + Send {
    /// Finds, checks and binds the inputs in the graphs of a pass. Called once for each pass, in the
    /// order of their numbers.
    fn bind(&mut self, host: &mut Host, pass: GraphVariant<'_>) -> Result<()>;

    /// Fills the inputs for a step. Must not allocate.
    fn fill(&mut self, host: &mut Host, chunk: Chunk<'_>) -> Result<()>;
}

/// Rows of the embedding table for the input `x` of the first shard.
#[derive(Debug)]
pub(super) struct EmbeddingRows {
    embedding: Embedding,
    inputs: Vec<FloatInput>,
}

impl EmbeddingRows {
    pub fn of(embedding: Embedding) -> Self {
        Self { embedding, inputs: Vec::new() }
    }

    /// The input `x` of a pass that is bound.
    pub fn input(&self, pass: usize) -> &FloatInput {
        &self.inputs[pass]
    }
}

impl Filler for EmbeddingRows {
    fn bind(&mut self, host: &mut Host, pass: GraphVariant<'_>) -> Result<()> {
        self.inputs.push(self.embedding.bind(host, pass.graphs[0], "x", pass.rows)?);
        Ok(())
    }

    fn fill(&mut self, host: &mut Host, chunk: Chunk<'_>) -> Result<()> {
        let input = &self.inputs[chunk.pass];
        self.embedding.fill(host, chunk.tokens, input)?;
        let hidden = self.embedding.hidden();
        chunk
            .soft_rows(hidden)
            .try_for_each(|(row, values)| input.write_at(host, row * hidden, values))
    }
}

/// Which rows of a step are tokens, for graphs that replace states: the rows behind the last token must not get into
/// them.
///
/// | input | shape | |
/// |---|---|---|
/// | `valid` | `[rows, 1]` | 1 for tokens, 0 for the rows behind them |
/// | `keep` | `[kept, kept + rows]` | in row i a 1 in the column of tokens + i, of older rows and then the step's: what a convolution keeps |
#[derive(Debug, Default)]
pub(super) struct ValidRows {
    passes: Vec<ValidPass>,
}

#[derive(Debug)]
struct ValidPass {
    valid: Vec<FloatInput>,
    /// With the number of rows that are kept, and the columns of each.
    keep: Vec<(FloatInput, usize, usize)>,
    /// Tokens that the inputs declare; none before the first step.
    tokens: Option<usize>,
}

const VALID: &str = "valid";
const KEEP: &str = "keep";

impl ValidRows {
    /// True when a graph has an input for which of its rows are tokens.
    pub fn has_inputs(host: &Host, graph: GraphId) -> bool {
        [VALID, KEEP].iter().any(|name| host.graph(graph).input(name).is_some())
    }
}

impl Filler for ValidRows {
    fn bind(&mut self, host: &mut Host, pass: GraphVariant<'_>) -> Result<()> {
        let valid = FloatInput::bind_all(host, pass.graphs, VALID)?;
        if let Some(input) = valid.iter().find(|input| input.len() != pass.rows) {
            let found =
                format!("{} values, expected one for each of {} rows", input.len(), pass.rows);
            return Err(input.misfit(host, &found));
        }
        let mut keep = Vec::new();
        for input in FloatInput::bind_all(host, pass.graphs, KEEP)? {
            let (kept, columns) = input.matrix(host)?;
            if kept.checked_add(pass.rows) != Some(columns) {
                let found = format!(
                    "rows of {columns} values, expected {kept}, as many as it has rows, and the step's {}",
                    pass.rows
                );
                return Err(input.misfit(host, &found));
            }
            keep.push((input, kept, columns));
        }
        self.passes.push(ValidPass { valid, keep, tokens: None });
        Ok(())
    }

    fn fill(&mut self, host: &mut Host, chunk: Chunk<'_>) -> Result<()> {
        let pass = &mut self.passes[chunk.pass];
        let tokens = chunk.tokens.len();
        if pass.tokens == Some(tokens) {
            return Ok(());
        }
        // Buffers begin as zeros; later the ones of the last step are taken back.
        let before = pass.tokens.replace(tokens);
        for input in &pass.valid {
            for row in 0..input.len() {
                input.write_at(host, row, &[if row < tokens { 1.0 } else { 0.0 }])?;
            }
        }
        for (input, kept, columns) in &pass.keep {
            for row in 0..*kept {
                if let Some(before) = before {
                    input.write_at(host, row * columns + before + row, &[0.0])?;
                }
                input.write_at(host, row * columns + tokens + row, &[1.0])?;
            }
        }
        Ok(())
    }
}

/// Rotary tables of all passes.
#[derive(Debug)]
pub(super) struct RotaryTables {
    rope: Rope,
    tables: Vec<RopeTables>,
}

impl RotaryTables {
    pub fn of(rope: Rope) -> Self {
        Self { rope, tables: Vec::new() }
    }
}

impl Filler for RotaryTables {
    fn bind(&mut self, host: &mut Host, pass: GraphVariant<'_>) -> Result<()> {
        self.tables.push(self.rope.bind_all(host, pass.graphs, pass.rows)?);
        Ok(())
    }

    fn fill(&mut self, host: &mut Host, chunk: Chunk<'_>) -> Result<()> {
        self.tables[chunk.pass].fill(host, &mut self.rope, chunk.position);
        Ok(())
    }
}

/// A causal mask of all passes.
#[derive(Debug)]
pub(super) struct Masks {
    mask: CausalMask,
    /// With true for graphs that read what others have cached: what they see ends before their own position.
    masks: Vec<(StepMask, bool)>,
}

impl Masks {
    pub fn of(mask: CausalMask) -> Self {
        Self { mask, masks: Vec::new() }
    }
}

impl Filler for Masks {
    fn bind(&mut self, host: &mut Host, pass: GraphVariant<'_>) -> Result<()> {
        let mask = match pass.begins {
            true => self.mask.without_cache(),
            false => self.mask.within(pass.capacity),
        };
        let before = pass.graphs.iter().all(|graph| reads_alone(host, *graph));
        self.masks.push((mask.bind(host, pass.graphs, pass.rows)?, before));
        Ok(())
    }

    fn fill(&mut self, host: &mut Host, chunk: Chunk<'_>) -> Result<()> {
        let (mask, before) = &mut self.masks[chunk.pass];
        let position = chunk.position.saturating_sub(usize::from(*before));
        match chunk.sight {
            Sight::Causal => mask.fill(host, position),
            Sight::Together => mask.fill_together(host, position, chunk.tokens.len()),
            Sight::Prefix => mask.fill_prefix(host, position, chunk.tokens.len()),
        }
        Ok(())
    }
}

/// Growth of queries with their position p, for graphs that multiply them by the input `q_scale` `[rows, 1]`:
/// `1 + beta · ln(1 + ⌊p / original⌋)` (`get_llama_4_attn_scale` of `transformers`).
#[derive(Debug, Deserialize)]
pub(super) struct QueryGrowth {
    beta: f32,
    original: f32,
    /// Those of each pass.
    #[serde(skip)]
    inputs: Vec<Vec<FloatInput>>,
}

impl QueryGrowth {
    /// The input.
    pub const ROLE: &str = "q_scale";

    fn at(&self, position: usize) -> f32 {
        1.0 + self.beta * (1.0 + (position as f32 / self.original).floor()).ln()
    }
}

impl Filler for QueryGrowth {
    fn bind(&mut self, host: &mut Host, pass: GraphVariant<'_>) -> Result<()> {
        if !(self.beta >= 0.0 && self.original >= 1.0) {
            return Err(Error::manifest(format!(
                "manifest /params/query_growth: beta {} and original {}, expected 0 or more, and 1 or more",
                self.beta, self.original
            )));
        }
        let inputs = FloatInput::bind_all(host, pass.graphs, Self::ROLE)?;
        if let Some(input) = inputs.iter().find(|input| input.len() != pass.rows) {
            let found =
                format!("{} values, expected one for each of {} rows", input.len(), pass.rows);
            return Err(input.misfit(host, &found));
        }
        self.inputs.push(inputs);
        Ok(())
    }

    fn fill(&mut self, host: &mut Host, chunk: Chunk<'_>) -> Result<()> {
        for input in &self.inputs[chunk.pass] {
            for row in 0..input.len() {
                input.write_at(host, row, &[self.at(chunk.position + row)])?;
            }
        }
        Ok(())
    }
}
