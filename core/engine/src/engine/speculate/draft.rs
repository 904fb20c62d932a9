//! Draft tokens of a second, smaller model.

use std::fs::File;
use std::path::Path;
use std::sync::Arc;

use qhx_base::LinkedToken;
use qhx_base::hash::sha256;
use qhx_base::{Error, ErrorKind, Result, bail, error};

use super::{Drafter, Speculation, Start, draft_sampler};
use crate::engine::model::Model;
use crate::op::{HostOp as _, Segment, SnapshotId, Task};
use crate::sampling::{Rng, Sampler};

/// Tokens that are consumed one by one rather than as a prompt.
const FEW: usize = 2;

/// A draft model, which decodes ahead of the target. It draws with the random numbers that the target will draw with.
struct Draft {
    name: String,
    model: Model,
    /// The ticket of the generation that it drafts for, which its executions look at.
    following: Option<LinkedToken>,
    input_vocab: usize,
    sampler: Option<Sampler>,
    /// The text as the target has it.
    text: Vec<u32>,
    /// Tokens that the state stands for: the first `agreed` ones of the text, and draft tokens.
    state: Vec<u32>,
    agreed: usize,
    /// A snapshot and the number of the text's first tokens that it stands for, where the op cannot truncate its state.
    saved: Option<(SnapshotId, usize)>,
}

impl Model {
    /// Sets a smaller draft model, for generations that [speculate](super::super::Speculate), instead of
    /// prompt lookup.
    ///
    /// Both must have the same tokenizer: the draft's tokens must be those of this model. There are
    /// no draft tokens for a prompt with images, audio or videos.
    ///
    /// # Errors
    /// When the tokenizers differ, or the draft does not generate.
    pub fn set_draft(&mut self, draft: Self) -> Result<()> {
        let draft = Draft::new(self, draft)?;
        self.speculation = Speculation::of(Box::new(draft));
        Ok(())
    }

    /// Sets another source of draft tokens, instead of prompt lookup.
    pub fn set_drafter(&mut self, drafter: Box<dyn Drafter>) {
        self.speculation = Speculation::of(drafter);
    }
}

/// The hash of a file's content.
fn hash(path: &Path) -> Result<String> {
    let file = File::open(path).map_err(|e| Error::io(ErrorKind::Io, path, e))?;
    sha256(ErrorKind::Io, path, file, |_| Ok(()))
}

impl Draft {
    fn new(target: &Model, mut draft: Model) -> Result<Self> {
        draft.require(Task::Generate, "generate")?;
        draft.op.require_logits()?;
        let name = draft.manifest().path.display().to_string();
        let wrong = |what: String| {
            error!(Usage, "{name}: as a draft of {}: {what}", target.manifest().path.display())
                .hint("a draft must have the tokenizer of the model it drafts for: take a smaller model of its family")
        };
        match (target.tokenizer(), draft.tokenizer()) {
            (Some(ours), Some(its)) if hash(ours.path())? != hash(its.path())? => {
                return Err(wrong(format!(
                    "its {} differs from {}",
                    its.path().display(),
                    ours.path().display()
                )));
            }
            (Some(_), None) => return Err(wrong("it has no tokenizer".to_owned())),
            (None, Some(_)) => {
                return Err(wrong("it has a tokenizer, the model has none".to_owned()));
            }
            _ => {}
        }
        let (texts, needed) = (&draft.bundle.texts, target.bundle.texts.allowed.end());
        let vocab = texts.input_vocab;
        if vocab < needed {
            return Err(wrong(format!("its vocabulary is {vocab}, expected at least {needed}")));
        }
        let texts = Arc::new(texts.bare());
        Arc::make_mut(&mut draft.bundle).texts = texts;
        Ok(Self {
            name,
            input_vocab: vocab,
            model: draft,
            following: None,
            sampler: None,
            text: Vec::new(),
            state: Vec::new(),
            agreed: 0,
            saved: None,
        })
    }

    /// Makes the state that of the text, with the logits of its last token.
    fn catch_up(&mut self) -> Result<()> {
        let text = self.text.get(self.agreed..).unwrap_or_default();
        let state = self.state.get(self.agreed..).unwrap_or_default();
        self.agreed += text.iter().zip(state).take_while(|(a, b)| a == b).count();
        if (self.agreed, self.state.len()) == (self.text.len(), self.text.len())
            && self.model.op.logits().is_ok()
        {
            return Ok(());
        }
        // Some token has to be consumed for its logits.
        let usable = self.agreed.min(self.text.len().saturating_sub(1));
        if self.state.len() > usable {
            self.rewind(usable)?;
        }
        let done = self.state.len();
        let rest = &self.text[done..];
        let result = if rest.len() <= FEW {
            rest.iter().try_for_each(|&token| self.model.op.decode(token))
        } else {
            self.model.op.prefill(&[Segment::Tokens(rest)])
        };
        self.state.extend_from_slice(rest);
        self.settle(result)?;
        self.agreed = self.text.len();
        Ok(())
    }

    /// After a call that may have failed part-way: what the op reports it has consumed.
    fn settle(&mut self, result: Result<()>) -> Result<()> {
        self.state.truncate(self.model.op.position());
        self.agreed = self.agreed.min(self.state.len());
        result
    }

    /// Returns to a state of at most `usable` tokens.
    fn rewind(&mut self, usable: usize) -> Result<()> {
        let result = if self.model.op.info().can_truncate && usable > 0 {
            self.model.op.truncate(usable)
        } else {
            match self.saved.filter(|(_, tokens)| *tokens <= usable) {
                Some((id, _)) => self.model.op.restore(id),
                None => self.model.op.reset(),
            }
        };
        self.settle(result)
    }

    /// Saves the state, which is that of the text, where it cannot be truncated to it.
    fn save(&mut self) -> Result<()> {
        let info = self.model.op.info();
        if info.can_truncate || !info.can_snapshot {
            return Ok(());
        }
        if let Some((id, _)) = self.saved.take() {
            self.model.op.drop_snapshot(id);
        }
        self.saved = Some((self.model.op.snapshot()?, self.text.len()));
        Ok(())
    }

    /// Adds draft tokens by decoding ahead of the text.
    fn decode_ahead(&mut self, max_drafts: usize, rng: &Rng, drafts: &mut Vec<u32>) -> Result<()> {
        let room = self.model.op.info().max_ctx.saturating_sub(self.text.len());
        let known = |&token: &u32| (token as usize) < self.input_vocab;
        if room == 0 || !self.text.get(self.agreed..).unwrap_or_default().iter().all(known) {
            return Ok(());
        }
        self.catch_up()?;
        let max_drafts = max_drafts.min(room);
        if max_drafts > 1 {
            self.save()?;
        }
        let Some(sampler) = &mut self.sampler else { return Ok(()) };
        sampler.draw_as(rng);
        for index in 0..max_drafts {
            let token = sampler
                .sample(self.model.op.logits()?)
                .map_err(|e| self.model.op.about_logits(e))?;
            drafts.push(token);
            if index + 1 < max_drafts {
                self.model.op.decode(token)?;
                self.state.push(token);
            }
        }
        Ok(())
    }
}

impl Drafter for Draft {
    fn name(&self) -> &str {
        &self.name
    }

    fn begin(&mut self, start: &Start<'_>) -> Result<()> {
        self.following = None;
        self.following = Some(self.model.space.cancel.follow(start.cancel));
        if start.media {
            bail!(Prompt, "the prompt has images, audio or videos, which a draft does not see");
        }
        self.model.revive()?;
        self.sampler = Some(draft_sampler(start, self.model.op.info())?);
        if self.state.len() != self.model.op.position() {
            // Drafting failed, or the model was opened again.
            self.state.clear();
            self.model.op.reset()?;
        }
        let room = start.prompt.len().saturating_add(start.max.min(1 << 20));
        self.text.clear();
        self.text.reserve(room);
        self.state.reserve(room.saturating_sub(self.state.len()));
        self.text.extend_from_slice(start.prompt);
        // The state is that of the last text.
        self.agreed = 0;
        if let Some((id, _)) = self.saved.take() {
            self.model.op.drop_snapshot(id);
        }
        if self.text.len() < self.model.op.info().max_ctx {
            let result = self.catch_up();
            if result.is_ok() || !self.model.space.loss.happened() {
                return result;
            }
            // The device restarted since the last generation, under another model perhaps.
            self.model.revive()?;
            self.state.clear();
            self.agreed = 0;
            self.catch_up()?;
        }
        Ok(())
    }

    fn push(&mut self, token: u32) {
        self.text.push(token);
    }

    fn draft(&mut self, max_drafts: usize, rng: &Rng, drafts: &mut Vec<u32>) -> Result<()> {
        let drafted = self.decode_ahead(max_drafts, rng, drafts);
        if drafted.is_err() {
            // What the state stands for is not known: the next generation begins with an empty one.
            self.state.clear();
            self.agreed = 0;
        }
        drafted
    }
}
