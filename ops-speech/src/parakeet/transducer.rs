//! The steps of a transducer over the rows of an encoder (Graves 2012, arXiv 1211.3711), and of one that says how long
//! each token lasts (Xu et al. 2023, arXiv 2304.06795), greedily.

use qhx_kit::fill::{Embedding, FloatInput};
use qhx_op::{Answer, Error, GraphId, Host, Result, View};
use serde::Deserialize;

use super::rows::{Rows, likeliest};

/// `params.transducer` of the manifest.
#[derive(Debug, Clone, Copy, Deserialize)]
struct Params {
    /// The token before the first one.
    start: u32,
    /// Maximum number of tokens that begin at a row, if tokens do not declare how long they last. An answer ends when
    /// it has this number of tokens a row.
    max_symbols: usize,
    /// Numbers of rows, from 0 on, of which one is chosen with each token; 0 where tokens do not say how long they
    /// last.
    #[serde(default)]
    durations: usize,
}

/// The graphs `predictor` and `joint`.
#[derive(Debug)]
pub(crate) struct Transducer {
    params: Params,
    blank: u32,
    embedding: Embedding,
    predictor: GraphId,
    /// The last token's row, and what the predictor carries from token to token.
    token: FloatInput,
    state: FloatInput,
    next: View,
    predicted: View,
    joint: GraphId,
    row: FloatInput,
    logits: View,
    /// Tokens among the logits.
    vocab: usize,
    /// Space for the state, and for the logits.
    values: Vec<f32>,
    scores: Vec<f32>,
}

impl Transducer {
    /// Binds the graphs of these names, for rows of `width` values.
    pub(crate) fn open(
        host: &mut Host,
        [predictor, joint]: [&str; 2],
        width: usize,
        blank: u32,
    ) -> Result<Self> {
        let params: Params = host.require("/params/transducer")?;
        let vocab: usize = host.require("/params/vocab")?;
        let predictor = host.require_graph("/plan/params/predictor", predictor)?;
        let joint = host.require_graph("/plan/params/joint", joint)?;
        let embedding = Embedding::open(host, width, Some(vocab))?;
        let token = embedding.bind(host, predictor, "x", 1)?;
        let state = FloatInput::require(host, predictor, "state")?;
        let output = |host: &mut Host, graph, role: &str, expected: usize| {
            let port = host.output(graph, role)?;
            let view = host.view_for(graph, port)?;
            if view.len != expected {
                return Err(host.misfit(graph, port, format_args!("expected {expected} values")));
            }
            Ok(view)
        };
        let next = output(host, predictor, "next", state.len())?;
        let predicted = output(host, predictor, "y", width)?;
        let logits = output(host, joint, "logits", vocab.saturating_add(params.durations))?;
        let row = FloatInput::require(host, joint, "x")?;
        let input = host.input(joint, "pred")?;
        let tensor = host.tensor(joint, input);
        if (tensor.elements(), tensor.dtype, row.len()) != (width, predicted.dtype, width) {
            let what = format!(
                "expected {width} values as the predictor gives them, beside a row of the \
                 encoder"
            );
            return Err(host.misfit(joint, input, what));
        }
        host.bind(joint, input, predicted.buffer, 0)?;
        if params.start as usize >= vocab || blank as usize >= vocab || params.max_symbols == 0 {
            return Err(Error::manifest(format!(
                "manifest /params/transducer: start {}, max_symbols {} beside the blank {blank}: expected tokens below \
                 {vocab}, and at least one symbol",
                params.start, params.max_symbols
            )));
        }
        Ok(Self {
            params,
            blank,
            embedding,
            predictor,
            token,
            state,
            next,
            predicted,
            joint,
            row,
            logits,
            vocab,
            values: vec![0.0; state.len()],
            scores: vec![0.0; vocab + params.durations],
        })
    }

    /// The tokens of the rows of a clip. `window` rows are those of the clip with one frame more.
    pub(super) fn answer(
        &mut self,
        host: &mut Host,
        rows: &Rows<'_>,
        window: usize,
    ) -> Result<Answer> {
        let Params { max_symbols, durations, .. } = self.params;
        let mut answer = Answer::default();
        self.begin(host)?;
        // As long as `generate` goes on where tokens last no time.
        let most = max_symbols.saturating_mul(window).saturating_sub(1);
        let (mut at, mut here) = (0, 0);
        for _ in 0..most {
            let Some(row) = rows.get(at) else { break };
            let token = self.choose(host, row)?;
            let blank = token == self.blank;
            here = if blank { 0 } else { here + 1 };
            let stays = !blank && here < max_symbols;
            let rows_on = match durations {
                0 => usize::from(!stays),
                // A blank that lasts no time would come again for ever.
                _ => self.length(host)?.max(usize::from(blank)),
            };
            if !blank {
                answer.tokens.push(token);
                // Where tokens do not say how long they last, each stands for its row.
                let lasts = if durations == 0 { 1 } else { rows_on };
                answer.times.push([rows.seconds(at), rows.seconds(at + lasts)]);
                self.predict(host, token)?;
            }
            if rows_on > 0 {
                here = 0;
            }
            at += rows_on;
        }
        Ok(answer)
    }

    /// Forgets the tokens before.
    pub(crate) fn begin(&mut self, host: &mut Host) -> Result<()> {
        self.state.fill(host, 0.0);
        self.predict(host, self.params.start)
    }

    /// The tokens of further rows, of which the first is row `first` of the audio, for a model whose tokens do not say
    /// how long they last.
    pub(crate) fn follow(
        &mut self,
        host: &mut Host,
        rows: &Rows<'_>,
        first: usize,
        answer: &mut Answer,
    ) -> Result<()> {
        for at in 0.. {
            let Some(row) = rows.get(at) else { break };
            for _ in 0..self.params.max_symbols {
                let token = self.choose(host, row)?;
                if token == self.blank {
                    break;
                }
                answer.tokens.push(token);
                answer.times.push([rows.seconds(first + at), rows.seconds(first + at + 1)]);
                self.predict(host, token)?;
            }
        }
        Ok(())
    }

    /// The likeliest token of a row, behind the tokens before.
    fn choose(&mut self, host: &mut Host, row: &[f32]) -> Result<u32> {
        self.row.write(host, row)?;
        host.execute(self.joint)?;
        host.dump("logits", self.logits, &[self.logits.len])?;
        self.logits.to_f32(host, 0, &mut self.scores)?;
        likeliest(host, self.joint, self.scores.get(..self.vocab).unwrap_or_default())
    }

    /// Rows that the token chosen last lasts.
    fn length(&self, host: &Host) -> Result<usize> {
        let lengths = self.scores.get(self.vocab..).unwrap_or_default();
        Ok(likeliest(host, self.joint, lengths)? as usize)
    }

    /// Has the predictor take a token.
    fn predict(&mut self, host: &mut Host, token: u32) -> Result<()> {
        self.embedding.fill(host, &[token], &self.token)?;
        host.execute(self.predictor)?;
        host.dump("predicted", self.predicted, &[self.predicted.len])?;
        self.next.to_f32(host, 0, &mut self.values)?;
        self.state.write(host, &self.values)
    }
}
