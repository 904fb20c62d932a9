//! Logits of next tokens, without choosing one.

use qhx_base::{CancelToken, Error, Result, bail, error};

use super::model::Model;
use super::types::Prompt;
use crate::op::HostOp as _;

impl Model {
    /// Consumes a prompt, and gives the logits of `tokens` behind it, with the soft cap of the model. State of earlier
    /// calls is used as [`Model::generate`] does, so that prompts that begin alike cost their ends only.
    ///
    /// # Errors
    /// Errors of [`Model::generate`] about the prompt, when a token is outside the vocabulary, when a logit is no
    /// finite number, and with [`ErrorKind::Cancelled`](qhx_base::ErrorKind::Cancelled) when `cancel` stops it.
    pub fn next_logits(
        &mut self,
        prompt: &Prompt,
        tokens: &[u32],
        cancel: &CancelToken,
    ) -> Result<Vec<f32>> {
        self.require_generation(prompt)?;
        self.op.require_logits()?;
        let vocab = self.op.info().vocab;
        if let Some(token) = tokens.iter().find(|&&token| token as usize >= vocab) {
            bail!(Usage, "token {token} is outside the model's vocabulary of {vocab}");
        }
        self.cancellable(cancel, |model| {
            model.revive()?;
            let prompt = model.encode_whole(prompt)?;
            model.consume(&prompt, &mut 0)?;
            let all = model.op.logits()?.capped(model.op.info().softcap);
            let logits: Vec<_> = tokens.iter().map(|&token| all[token as usize]).collect();
            match logits.iter().position(|logit| !logit.is_finite()) {
                None => Ok(logits),
                Some(at) => Err(model.unusable(tokens[at], logits[at])),
            }
        })
    }

    /// The error of a logit that is no finite number. What made it so may lie in the state.
    fn unusable(&mut self, token: u32, logit: f32) -> Error {
        let error = error!(Execute, "the logit of token {token} is {logit}");
        let error = self.op.about_logits(error);
        self.forget_state();
        error
    }
}
