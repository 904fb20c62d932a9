//! A drafting head: layers that predict the token after next from a hidden state of the decoder and the token that was
//! chosen there (multi-token prediction: DeepSeek-V3, arXiv 2412.19437, section 2.2).
//!
//! The head takes a pair: the hidden state of a position, and the embedding of the token at the next one. Its layers
//! have a cache of pairs, which follows the text: every token that the decoder consumes completes a pair. Pairs go
//! through the head's graphs together, when a draft token is asked for or when there are as many as its widest graph
//! takes. So a plain step costs a copy of one hidden state.
//!
//! Several draft tokens are made by feeding the head its own hidden states; these pairs leave the cache before the text
//! goes on. The head's positions are those of pairs: where pairs are missing, as those of an image, it goes on behind
//! them as if nothing were there. That costs draft tokens that are right, and never changes an answer.
//!
//! A head may also be without a cache and read the decoder's, as Gemma 4's does: its graphs have inputs `past_X` and no
//! outputs `new_X`. Then it needs the hidden state of the last token alone. All draft tokens of a step are made at the
//! position of the first, as none of them is in a cache, and each from the hidden state that the one before gave.

use super::clusters::Clusters;
use super::draft_graphs::{DRAFT_HEAD, DraftGraphs};
use super::head::HiddenRows;
use super::inputs::{Chunk, Filler, GraphVariant, Sight};
use crate::fill::FloatInput;
use crate::kernels::all_finite;
use crate::state::StateCarrier;
use qhx_op::{DType, Error, GraphId, Host, Port, Result, SnapshotId, View};

/// Ends the bytes of a state that has those of a drafting head.
const MAGIC: [u8; 8] = *b"qhxdraf\x01";

/// A graph of the head: `x` and `h` to `y`.
#[derive(Debug)]
struct HeadPass {
    graph: [GraphId; 1],
    rows: usize,
    hidden: FloatInput,
    tail: HiddenRows,
    /// Number of its rows among those that the decoder's head reads.
    source: usize,
    /// Positions that the caches hold as it reads them.
    capacity: usize,
    /// Logits of its own, and the scores of clusters where it has those.
    logits: Option<View>,
    clusters: Option<View>,
}

/// Source of the logits of a draft token.
#[derive(Debug, Clone, Copy)]
pub(super) enum Drafted {
    /// A row of a source of the decoder's head.
    Hidden { source: usize, row: usize },
    /// Nothing: these are they.
    Logits(View),
}

/// State of the head that belongs to a snapshot of the decoder.
#[derive(Debug)]
struct Saved {
    of: SnapshotId,
    state: SnapshotId,
    base: usize,
    tokens: Vec<u32>,
    hidden: Vec<u8>,
}

/// The graphs of a drafting head, the narrowest first, and its state.
#[derive(Debug)]
pub(super) struct DraftHead {
    passes: Vec<HeadPass>,
    /// Number of the first of them, behind the decoder's.
    first: usize,
    /// It reads the decoder's caches. Its own state has no tensors then, and counts draft tokens.
    reads: bool,
    clusters: Option<Clusters>,
    state: StateCarrier,
    capacity: usize,
    /// Position in the text of the first pair's hidden state, less the pairs that are missing before it.
    base: usize,
    /// Tokens of pairs that are not in the cache.
    tokens: Vec<u32>,
    /// Hidden states of these pairs, and of the last token of the text.
    hidden: Vec<u8>,
    /// Bytes of a hidden state.
    row: usize,
    dtype: DType,
    /// Pairs at the end of the cache that are not of the text.
    ahead: usize,
    /// Pass and row of the last draft token.
    last: (usize, usize),
    saved: Vec<Saved>,
    on: bool,
}

impl DraftHead {
    /// Finds and binds the graphs. `first` is the number of the first among all passes.
    ///
    /// # Errors
    /// When a tensor is missing or has another shape, or when no graph takes one pair.
    pub fn open(
        host: &mut Host,
        DraftGraphs { graphs, reads }: DraftGraphs,
        first: usize,
        hidden: usize,
        decoder: &StateCarrier,
    ) -> Result<Self> {
        if graphs.first().is_none_or(|(rows, _)| *rows != 1) {
            return Err(Error::manifest(format!(
                "manifest {DRAFT_HEAD}: its graphs take {:?} pairs, expected one among them that takes 1",
                graphs.iter().map(|(rows, _)| rows).collect::<Vec<_>>()
            )));
        }
        let groups: Vec<_> = graphs.iter().map(|(_, graph)| [*graph]).collect();
        let groups: Vec<&[GraphId]> = groups.iter().map(<[GraphId; 1]>::as_slice).collect();
        let state = StateCarrier::new(host, if reads { &[] } else { &groups })?;
        let mut passes: Vec<HeadPass> = Vec::with_capacity(graphs.len());
        for (index, &(rows, graph)) in graphs.iter().enumerate() {
            state.check_complete(host, index)?;
            let input = FloatInput::require(host, graph, "h")?;
            let port = host.output(graph, "y")?;
            for port in [Port::Input(host.graph(graph).require_input("h")?), port] {
                let found = host.rows_of(graph, port)?;
                if found != (rows, hidden) {
                    let what =
                        format!("expected {rows} rows of {hidden} values, one for each row of x");
                    return Err(host.misfit(graph, port, what));
                }
            }
            let view = host.view_for(graph, port)?;
            let same = passes.first().is_none_or(|pass| pass.hidden.dtype() == input.dtype());
            if view.dtype != input.dtype() || !same {
                let what = format!(
                    "its type differs from that of input h; expected one type in all graphs of \
                     manifest {DRAFT_HEAD}"
                );
                return Err(host.misfit(graph, port, what));
            }
            let tail = HiddenRows { graph, port, view, rows };
            let capacity = if reads {
                decoder.capacity_in(first + index).unwrap_or(0)
            } else {
                state.capacity().unwrap_or(usize::MAX)
            };
            let mut float = |role: &str| {
                let port = host.graph(graph).output(role).filter(|_| reads).map(Port::Output);
                port.map(|port| host.view_for(graph, port)).transpose()
            };
            let (logits, clusters) = (float("logits")?, float("centroids")?);
            let (graph, source) = ([graph], 0);
            passes.push(HeadPass {
                graph,
                rows,
                hidden: input,
                tail,
                source,
                capacity,
                logits,
                clusters,
            });
        }
        let widest = passes.iter().map(|pass| pass.rows).max().unwrap_or(1);
        let dtype = passes[0].hidden.dtype();
        let row = hidden * dtype.size();
        let capacity = state.capacity().unwrap_or(usize::MAX);
        let clusters =
            Clusters::open(host, passes.iter().map(|p| (p.graph[0], p.logits, p.clusters)))?;
        Ok(Self {
            passes,
            first,
            reads,
            clusters,
            state,
            capacity,
            base: 0,
            tokens: Vec::with_capacity(widest + 1),
            hidden: Vec::with_capacity((widest + 2) * row),
            row,
            dtype,
            ahead: 0,
            last: (0, 0),
            saved: Vec::new(),
            on: false,
        })
    }

    /// Its graphs as passes, for what fills inputs.
    pub fn passes(&self) -> impl Iterator<Item = GraphVariant<'_>> {
        self.passes.iter().enumerate().map(|(index, pass)| GraphVariant {
            index: self.first + index,
            graphs: &pass.graph,
            rows: pass.rows,
            begins: false,
            capacity: pass.capacity,
        })
    }

    /// Adds its hidden states to the `sources` of the decoder's head.
    pub fn add_sources(&mut self, sources: &mut Vec<HiddenRows>) {
        for pass in &mut self.passes {
            pass.source = sources.len();
            sources.push(pass.tail);
        }
    }

    /// Checks that the decoder's hidden states are of its type.
    ///
    /// # Errors
    /// When they are of another.
    pub fn check_rows(&self, host: &Host, rows: &HiddenRows) -> Result<()> {
        if rows.view.dtype == self.dtype
            && rows.view.len == rows.rows * self.row / self.dtype.size()
        {
            return Ok(());
        }
        let pass = &self.passes[0];
        let what = format!(
            "expected rows like those of input h of graph {:?} (manifest {DRAFT_HEAD})",
            host.graph(pass.graph[0]).name
        );
        Err(host.misfit(rows.graph, rows.port, what))
    }

    /// Switches drafting: if `on`, draft tokens are asked for from here on.
    ///
    /// # Errors
    /// None, as long as its state has caches alone.
    pub fn switch(&mut self, on: bool) -> Result<()> {
        if on && !self.on {
            // What was consumed meanwhile is not known.
            self.state.truncate(0)?;
            self.tokens.clear();
            self.hidden.clear();
            (self.base, self.ahead) = (0, 0);
        }
        self.on = on;
        Ok(())
    }

    /// True while they may be asked for.
    pub fn is_on(&self) -> bool {
        self.on
    }

    /// Positions of the text that it knows of.
    fn end(&self) -> usize {
        self.base + self.state.position() - self.ahead + self.hidden.len() / self.row
    }

    /// Begins at a position of the text, with nothing before it.
    fn restart(&mut self, host: &mut Host, position: usize) {
        self.state.reset(host);
        self.tokens.clear();
        self.hidden.clear();
        (self.base, self.ahead) = (position, 0);
    }

    /// Forgets the pairs that are not of the text.
    fn settle(&mut self) -> Result<()> {
        if self.ahead > 0 {
            self.state.truncate(self.state.position() - self.ahead)?;
            self.ahead = 0;
        }
        Ok(())
    }

    /// The decoder consumed `tokens` from position `before` on, whose hidden states are the first of `rows`. Of soft
    /// tokens only the last one's is of use. What fails here costs draft tokens and nothing else.
    pub fn consumed(
        &mut self,
        host: &mut Host,
        fillers: &mut [Box<dyn Filler>],
        before: usize,
        tokens: &[u32],
        rows: Option<(HiddenRows, bool)>,
    ) {
        if !self.on {
            return;
        }
        if self.settle().is_err() || self.end() != before {
            self.restart(host, before);
        }
        let Some((rows, soft)) = rows else {
            self.restart(host, before + tokens.len());
            return;
        };
        let alone = soft || self.reads;
        let first = if alone { tokens.len() - 1 } else { 0 };
        if alone {
            self.restart(host, before + first);
        }
        let widest = self.passes.last().map_or(1, |pass| pass.rows);
        for (index, &token) in tokens.iter().enumerate().skip(first) {
            if self.tokens.len() == widest && self.flush(host, fillers).is_err() {
                self.restart(host, before + index);
            }
            if !self.hidden.is_empty() {
                self.tokens.push(token);
            }
            let start = rows.view.offset + index * self.row;
            let bytes = host.bytes(rows.view.buffer).get(start..start + self.row);
            self.hidden.extend_from_slice(bytes.unwrap_or_default());
        }
    }

    /// Takes the pairs of `tokens` into the cache, so that only the last hidden state is left.
    fn flush(&mut self, host: &mut Host, fillers: &mut [Box<dyn Filler>]) -> Result<()> {
        let count = self.tokens.len();
        if count == 0 {
            return Ok(());
        }
        let pass = match self.reads {
            true => self.last.0,
            false => self.passes.iter().position(|pass| count <= pass.rows).unwrap_or(0),
        };
        let HeadPass { hidden, .. } = &self.passes[pass];
        host.bytes_mut(hidden.buffer())[..count * self.row]
            .copy_from_slice(&self.hidden[..count * self.row]);
        self.run(host, fillers, pass)?;
        self.hidden.drain(..count * self.row);
        self.tokens.clear();
        Ok(())
    }

    /// Runs `self.tokens` with the hidden states that stand in the input of a pass.
    fn run(&mut self, host: &mut Host, fillers: &mut [Box<dyn Filler>], pass: usize) -> Result<()> {
        let cached = self.state.position();
        if cached + self.tokens.len() > self.capacity {
            return Err(Error::prompt("the drafting head's cache is full"));
        }
        let position = if self.reads { self.base + 1 } else { cached };
        let (tokens, track) = (self.tokens.as_slice(), self.state.track());
        let number = self.first + pass;
        let chunk = Chunk {
            pass: number,
            tokens,
            position,
            track,
            index: 0,
            soft: &[],
            sight: Sight::Causal,
        };
        fillers.iter_mut().try_for_each(|filler| filler.fill(host, chunk))?;
        host.execute(self.passes[pass].graph[0])?;
        self.state.commit(host, pass, self.tokens.len())?;
        self.last = (pass, self.tokens.len() - 1);
        Ok(())
    }

    /// Runs the pair of the last hidden state and `token`, which follows the text in the caches of `decoder`.
    ///
    /// # Errors
    /// When it knows no hidden state at the text's end, or a graph fails.
    pub fn draft(
        &mut self,
        host: &mut Host,
        fillers: &mut [Box<dyn Filler>],
        decoder: &StateCarrier,
        token: u32,
    ) -> Result<Drafted> {
        if !self.on || self.end() != decoder.position() || self.hidden.is_empty() {
            return Err(Error::unsupported(
                "a draft token of a text that the drafting head did not see; its call `drafting` comes before the text",
            ));
        }
        if self.reads && self.ahead == 0 {
            let mut groups = self.first..self.first + self.passes.len();
            self.last.0 = groups.position(|group| decoder.is_arranged(group)).ok_or_else(|| {
                Error::unsupported(&format!(
                    "a draft token of a text in caches whose rows no graph of manifest {DRAFT_HEAD} reads"
                ))
            })?;
        }
        if self.ahead == 0 {
            if self.tokens.len() == self.passes.last().map_or(1, |pass| pass.rows) {
                self.flush(host, fillers)?;
            }
            // The hidden state stays for the pair of the token that the text goes on with.
            let last = self.hidden.len() - self.row;
            self.tokens.push(token);
            self.hidden.extend_from_within(last..);
            if let Err(e) = self.flush(host, fillers) {
                self.tokens.pop();
                self.hidden.truncate(last + self.row);
                return Err(e);
            }
        } else {
            let (pass, row) = self.last;
            let next = if self.reads { pass } else { 0 };
            let from = self.passes[pass].tail.view;
            let start = from.offset + row * self.row;
            let (read, write) = host.pair(from.buffer, self.passes[next].hidden.buffer());
            write[..self.row].copy_from_slice(&read[start..start + self.row]);
            self.tokens.push(token);
            let run = self.run(host, fillers, next);
            self.tokens.clear();
            run?;
        }
        self.ahead += 1;
        let (pass, row) = self.last;
        let HeadPass { source, logits, clusters, .. } = self.passes[pass];
        let Some(logits) = logits else { return Ok(Drafted::Hidden { source, row }) };
        if let (Some(all), Some(scores)) = (&mut self.clusters, clusters) {
            all.mask(host, scores, logits)?;
        }
        Ok(Drafted::Logits(logits))
    }

    /// Checks that logits of its own are as many as the decoder's.
    ///
    /// # Errors
    /// When they are not.
    pub fn check_vocab(&self, host: &Host, vocab: usize) -> Result<()> {
        let fits = |pass: &&HeadPass| pass.logits.is_none_or(|logits| logits.len == vocab);
        let Some(pass) = self.passes.iter().find(|pass| !fits(pass)) else { return Ok(()) };
        Err(Error::graph(format!(
            "graph {:?}: it gives {} logits, expected {vocab}, as the decoder's head (manifest {DRAFT_HEAD})",
            host.graph(pass.graph[0]).name,
            pass.logits.map_or(0, |logits| logits.len)
        )))
    }

    /// Forgets all positions of the text from `position` on. The pair at the end is missing then, unless its hidden
    /// state is still there.
    pub fn truncate(&mut self, host: &mut Host, position: usize) {
        if self.settle().is_err() || position > self.end() {
            return self.restart(host, position);
        }
        let cached = self.base + self.state.position();
        if position > cached {
            self.hidden.truncate((position - cached) * self.row);
            self.tokens.truncate(position - cached - 1);
            return;
        }
        let pairs = position.checked_sub(self.base + 1);
        match pairs.filter(|pairs| self.state.truncate(*pairs).is_ok()) {
            Some(pairs) => {
                self.tokens.clear();
                self.hidden.clear();
                self.base = position - pairs;
            }
            None => self.restart(host, position),
        }
    }

    /// The decoder saved its state, at `position`.
    pub fn save(&mut self, host: &Host, of: SnapshotId, position: usize) {
        if !self.on || self.settle().is_err() || self.end() != position {
            return;
        }
        let state = self.state.snapshot(host);
        let (tokens, hidden) = (self.tokens.clone(), self.hidden.clone());
        self.saved.push(Saved { of, state, base: self.base, tokens, hidden });
    }

    /// The decoder returned to a saved state, at `position`.
    pub fn restore(&mut self, host: &mut Host, of: SnapshotId, position: usize) {
        let Some(saved) = self.saved.iter().find(|saved| saved.of == of) else {
            return self.restart(host, position);
        };
        if self.state.restore(host, saved.state).is_err() {
            return self.restart(host, position);
        }
        (self.base, self.ahead) = (saved.base, 0);
        self.tokens.clone_from(&saved.tokens);
        self.hidden.clone_from(&saved.hidden);
    }

    /// The decoder freed a saved state.
    pub fn drop_saved(&mut self, of: SnapshotId) {
        if let Some(index) = self.saved.iter().position(|saved| saved.of == of) {
            self.state.drop_snapshot(self.saved.remove(index).state);
        }
    }

    /// Appends what it knows of a text of `position` tokens to the exported state of the decoder.
    ///
    /// # Errors
    /// When a graph fails, or the bytes do not fit the memory.
    pub fn export(
        &mut self,
        host: &mut Host,
        fillers: &mut [Box<dyn Filler>],
        position: usize,
        bytes: &mut Vec<u8>,
    ) -> Result<()> {
        if !self.on || self.settle().is_err() || self.end() != position || self.hidden.is_empty() {
            return Ok(());
        }
        self.flush(host, fillers)?;
        let state = self.state.export(host)?;
        let input = &self.passes[0].hidden;
        host.bytes_mut(input.buffer()).copy_from_slice(&self.hidden);
        let mut row = vec![0.0; input.len()];
        View { buffer: input.buffer(), dtype: self.dtype, offset: 0, len: row.len() }
            .to_f32(host, 0, &mut row)?;
        bytes.extend_from_slice(&state);
        bytes.extend(row.iter().flat_map(|value| value.to_le_bytes()));
        for number in [state.len(), row.len() * size_of::<f32>(), self.state.position()] {
            bytes.extend_from_slice(&(number as u64).to_le_bytes());
        }
        bytes.extend_from_slice(&MAGIC);
        Ok(())
    }

    /// Takes what [`DraftHead::export`] appended. Without that, or where it is another head's, it begins at `position`.
    pub fn import(&mut self, host: &mut Host, position: usize, exported: Option<&Exported<'_>>) {
        self.restart(host, position);
        let Some(exported) = exported else { return };
        let input = self.passes[0].hidden;
        let row: Vec<_> =
            exported.row.as_chunks().0.iter().copied().map(f32::from_le_bytes).collect();
        let fits = all_finite(bytemuck::cast_slice(&row), DType::F32)
            && input.write(host, &row).is_ok()
            && exported.position < position
            && self.state.import(host, exported.position, exported.state).is_ok();
        if fits {
            self.hidden.extend_from_slice(&host.bytes(input.buffer())[..self.row]);
            self.base = position - 1 - exported.position;
        }
    }
}

/// Bytes that a drafting head appended to the exported state of its decoder.
#[derive(Debug)]
pub(super) struct Exported<'a> {
    position: usize,
    state: &'a [u8],
    /// A hidden state, f32.
    row: &'a [u8],
}

/// The exported state of a decoder, and that of its drafting head, where there is one.
///
/// # Errors
/// When the bytes end as those with one do, and have no room for it.
pub(super) fn split(bytes: &[u8]) -> Result<(&[u8], Option<Exported<'_>>)> {
    let Some(rest) = bytes.strip_suffix(&MAGIC) else { return Ok((bytes, None)) };
    let cut = || {
        let message = format!(
            "the state of a drafting head does not fit into {} bytes; they are damaged",
            bytes.len()
        );
        Error::prompt(message)
    };
    let number = |bytes: &[u8; 8]| usize::try_from(u64::from_le_bytes(*bytes)).ok();
    let (rest, position) = rest.split_last_chunk().ok_or_else(cut)?;
    let (rest, row) = rest.split_last_chunk().ok_or_else(cut)?;
    let (rest, state) = rest.split_last_chunk().ok_or_else(cut)?;
    let before = |rest: &'_ [u8], length: &[u8; 8]| rest.len().checked_sub(number(length)?);
    let (rest, row) = rest.split_at(before(rest, row).ok_or_else(cut)?);
    let (rest, state) = rest.split_at(before(rest, state).ok_or_else(cut)?);
    let position = number(position).ok_or_else(cut)?;
    Ok((rest, Some(Exported { position, state, row })))
}
