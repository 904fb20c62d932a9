//! Draft-length control: how many draft tokens a verification step takes, as many as pay.
//!
//! A step of several rows costs more than a plain one, how much more is measured while the run lasts. With an
//! acceptance rate α it gives (1 − αⁿ⁺¹) / (1 − α) tokens for n draft tokens on average (Leviathan et al. 2023,
//! equation 1). The n with the highest tokens per second is taken, if that is more than plain steps give.
//!
//! So that a run never gets slower than plain decoding by more than [`MAX_SLOWDOWN`], there is an account: the prompt
//! adds that share of its time, each token that share of a plain step, and each step of several rows what it saved or
//! lost. One is made only where the account covers the worst case, one token for all of its cost. The maximum cost of a
//! step of n rows is known before the first one: what n plain steps cost, or one of more rows, or the prompt. After the
//! first run of a model the cost itself is known, so that later ones draft from their beginning on.

use crate::engine::types::Speculate;

/// Maximum slowdown of a run compared with plain decoding.
const MAX_SLOWDOWN: f64 = 0.04;
/// Weight of a new measurement in a mean.
const EMA_WEIGHT: f64 = 0.25;
/// Weight of an earlier trial relative to the next one.
const TRIAL_DECAY: f64 = 0.95;
/// Acceptance rate before there are trials.
const PRIOR_ACCEPTANCE: f64 = 0.7;
/// Decay, for each plain step, of a cost that was found too high: it is tried again some day.
const COST_DECAY: f64 = 0.99;

/// Seconds of a step of n rows.
#[derive(Debug, Clone, Copy, Default)]
struct Cost {
    /// Measured: rows and their logits.
    pass: Option<f64>,
    /// Measured: what accepting only some of the tokens takes.
    again: Option<f64>,
    /// Upper bound, as far as it is known from the prompt.
    bound: Option<f64>,
}

/// Decides on the number of draft tokens.
#[derive(Debug, Default)]
pub(super) struct DraftLength {
    mode: Speculate,
    /// Rows of steps, ascending, and what they cost.
    widths: Vec<(usize, Cost)>,
    /// Accepting a part of the tokens runs them through the graphs again.
    repeats: bool,
    plain: Option<f64>,
    /// Seconds to make a draft token.
    draft: Option<f64>,
    free: bool,
    hits: f64,
    trials: f64,
    /// Seconds that may be lost.
    account: f64,
    /// Plain steps since the last of several rows.
    idle: i32,
}

/// A new mean of a measurement.
fn mean(old: &mut Option<f64>, new: f64) {
    *old = Some(old.map_or(new, |old| old + EMA_WEIGHT * (new - old)));
}

impl DraftLength {
    /// A run begins. `free`: draft tokens cost nothing. `repeats`: see [`DraftLength`]. What was measured before stays.
    pub fn begin(&mut self, mode: Speculate, widths: &[usize], free: bool, repeats: bool) {
        if !self.widths.iter().map(|(width, _)| width).eq(widths) {
            self.widths.clear();
            self.widths.extend(widths.iter().map(|&width| (width, Cost::default())));
        }
        (self.mode, self.free, self.repeats) = (mode, free, repeats);
        (self.account, self.idle) = (0.0, 0);
        (self.hits, self.trials) = (self.hits * 0.3, self.trials * 0.3);
    }

    /// A prompt of `tokens` tokens took `seconds`: no step of as many rows takes longer. It is a part of the run that
    /// is not to get slower.
    pub fn prompt(&mut self, tokens: usize, seconds: f64) {
        self.account += MAX_SLOWDOWN * seconds;
        let widest = self.widest().max(1);
        let each = seconds / (tokens / widest).max(1) as f64;
        for (width, cost) in &mut self.widths {
            cost.bound = (*width <= tokens).then_some(each);
        }
    }

    /// Maximum number of rows of a step.
    pub fn widest(&self) -> usize {
        self.widths.last().map_or(0, |(width, _)| *width)
    }

    fn rate(&self) -> f64 {
        (self.hits + PRIOR_ACCEPTANCE) / (self.trials + 1.0)
    }

    /// Number of draft tokens to make, at most `max_drafts`; 0 for a plain step.
    pub fn plan(&self, max_drafts: usize) -> usize {
        let max_drafts = max_drafts.min(self.widest().saturating_sub(1));
        match self.mode {
            Speculate::Off | Speculate::Model => 0,
            Speculate::Tokens(count) => max_drafts.min(count.get()),
            Speculate::Auto => self.plain.map_or(0, |plain| self.best(max_drafts, plain)),
        }
    }

    fn best(&self, max_drafts: usize, plain: f64) -> usize {
        let rate = self.rate();
        let decay = COST_DECAY.powi(self.idle);
        // A draft model's step takes less than a plain one, or it would be none.
        let max_draft_cost = if self.free { 0.0 } else { self.draft.unwrap_or(plain) };
        let draft = if self.free { 0.0 } else { self.draft.unwrap_or(0.0) * decay };
        let (mut best, mut found, mut drafts) = (1.0 / plain, 0, 1);
        for (index, (width, cost)) in self.widths.iter().enumerate() {
            // A step costs at most what as many plain ones do, and what one of more rows does.
            let wider = self.widths[index..].iter().filter_map(|(_, wider)| wider.pass);
            let wider = wider.fold(cost.bound.unwrap_or(f64::INFINITY), f64::min);
            let bound = (*width as f64 * plain).min(wider);
            let worst = cost.pass.unwrap_or(bound);
            let again = if self.repeats { cost.again.unwrap_or(bound) } else { 0.0 };
            // What was never tried may be as cheap as a plain step.
            let pass = cost.pass.map_or(plain, |pass| (pass * decay).max(plain.min(pass)));
            while drafts < *width && drafts <= max_drafts {
                let all = rate.powi(drafts as i32);
                let tokens = (1.0 - all * rate) / (1.0 - rate).max(1e-9);
                let drafting = drafts as f64 * draft;
                let expected = pass + drafting + (1.0 - all) * again * decay;
                let lost = worst + again + drafts as f64 * max_draft_cost - plain;
                let covered = lost <= self.account;
                if covered && tokens / expected > best {
                    (best, found) = (tokens / expected, drafts);
                }
                drafts += 1;
            }
        }
        found
    }

    /// A plain step took `seconds`.
    pub fn stepped(&mut self, seconds: f64) {
        mean(&mut self.plain, seconds);
        self.account += MAX_SLOWDOWN * self.plain.unwrap_or(0.0);
        self.idle = self.idle.saturating_add(1);
        if !self.free {
            // Nothing else shows whether the text has become easier to predict.
            (self.hits, self.trials) = (self.hits * COST_DECAY, self.trials * COST_DECAY);
        }
    }

    /// Records whether a draft token that no step verified was right.
    pub fn compared(&mut self, right: bool) {
        self.try_one(right);
    }

    fn try_one(&mut self, right: bool) {
        self.hits = self.hits * TRIAL_DECAY + f64::from(u8::from(right));
        self.trials = self.trials * TRIAL_DECAY + 1.0;
    }

    /// A step verified `drafted` draft tokens, of which `accepted` were accepted.
    pub fn verified(&mut self, drafted: usize, accepted: usize, time: &StepTime) {
        for index in 0..drafted.min(accepted + 1) {
            self.try_one(index < accepted);
        }
        self.idle = 0;
        if let Some((_, cost)) = self.widths.iter_mut().find(|(width, _)| drafted < *width) {
            mean(&mut cost.pass, time.pass);
            if accepted < drafted {
                mean(&mut cost.again, time.keep);
            }
        }
        if drafted > 0 {
            mean(&mut self.draft, time.draft / drafted as f64);
        }
        let tokens = (accepted + 1) as f64;
        let saved = tokens * self.plain.unwrap_or(0.0) * (1.0 + MAX_SLOWDOWN);
        self.account += saved - (time.pass + time.keep + time.draft);
    }
}

/// Seconds that a step of several rows took.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct StepTime {
    /// Making the draft tokens.
    pub draft: f64,
    /// The rows and their logits.
    pub pass: f64,
    /// Accepting those that were right.
    pub keep: f64,
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sampling::Rng;

    /// A run of `tokens` tokens where a plain step takes a second, one of `widths` rows as long as given, a draft token
    /// is right with `rate`, and accepting a part takes `again`. Returns its seconds and the number of verification
    /// steps.
    fn simulate(
        tokens: usize,
        widths: &[(usize, f64)],
        rate: impl Fn(usize) -> f64,
        again: f64,
        draft: f64,
    ) -> (f64, usize) {
        let mut length = DraftLength::default();
        let rows: Vec<_> = widths.iter().map(|(width, _)| *width).collect();
        length.begin(Speculate::Auto, &rows, draft == 0.0, again > 0.0);
        let mut rng = Rng::new(3);
        let (mut done, mut seconds, mut passes) = (0, 0.0, 0);
        while done < tokens {
            let mut right = || (rng.below(1 << 20) as f64) < rate(done) * f64::from(1 << 20);
            let count = length.plan(tokens - done - 1);
            if count == 0 {
                length.stepped(1.0);
                if draft == 0.0 {
                    length.compared(right());
                }
                (done, seconds) = (done + 1, seconds + 1.0);
                continue;
            }
            let accepted = (0..count).take_while(|_| right()).count();
            let pass = widths.iter().find(|(width, _)| count < *width).unwrap().1;
            let keep = if accepted < count { again } else { 0.0 };
            let time = StepTime { draft: draft * count as f64, pass, keep };
            length.verified(count, accepted, &time);
            seconds += time.draft + time.pass + time.keep;
            (done, passes) = (done + accepted + 1, passes + 1);
        }
        (seconds, passes)
    }

    #[test]
    fn no_run_gets_slower_than_plain_by_more_than_a_twentieth() {
        for tokens in [1, 5, 20, 100, 1000, 5000] {
            for widths in [&[(4, 1.05)][..], &[(4, 1.5), (16, 3.0)], &[(16, 9.0)], &[(128, 90.0)]] {
                for rate in [0.0, 0.1, 0.5, 0.9, 1.0] {
                    for (again, draft) in [(0.0, 0.0), (1.1, 0.0), (0.0, 0.2), (9.0, 0.9)] {
                        let (seconds, _) = simulate(tokens, widths, |_| rate, again, draft);
                        let limit = 1.05 * tokens as f64;
                        let case = (tokens, widths, rate, again, draft);
                        assert!(seconds <= limit, "{case:?}: {seconds} s, plain {tokens} s");
                    }
                }
            }
        }
    }

    #[test]
    fn drafting_pays_where_it_can_and_comes_back() {
        let cheap = [(4, 1.05), (16, 1.2)];
        let seconds = |rate: f64| simulate(1000, &cheap, |_| rate, 0.0, 0.0).0;
        assert!(
            seconds(0.95) < 200.0 && seconds(0.5) < 650.0,
            "{} {}",
            seconds(0.95),
            seconds(0.5)
        );
        // A draft model costs a tenth of a step for each draft token.
        let (draft, _) = simulate(1000, &cheap, |_| 0.8, 0.0, 0.1);
        assert!(draft < 600.0, "{draft}");
        // Nothing can be predicted at first, and then everything.
        let later = |done: usize| if done < 500 { 0.0 } else { 0.98 };
        for draft in [0.0, 0.1] {
            let (seconds, _) = simulate(1500, &[(8, 2.5)], later, 0.0, draft);
            assert!(seconds < 1250.0, "{draft}: {seconds}");
        }
        // A step that costs sixteen plain ones is not for texts of this kind. Only trying shows it.
        let (_, tries) = simulate(1000, &[(16, 16.0)], |_| 0.5, 0.0, 0.0);
        assert!(tries <= 2, "{tries}");
    }

    /// Plain steps before the first draft token is verified, of tokens that are always predicted right.
    fn patience(length: &mut DraftLength) -> usize {
        let waits = |_: &usize| {
            let waits = length.plan(3) == 0;
            if waits {
                length.stepped(1.0);
                length.compared(true);
            }
            waits
        };
        (0..1000).take_while(waits).count()
    }

    #[test]
    fn the_first_draft_comes_sooner_the_more_is_known() {
        let begun = |prompt: Option<(usize, f64)>| {
            let mut length = DraftLength::default();
            length.begin(Speculate::Auto, &[4, 16], true, false);
            if let Some((tokens, seconds)) = prompt {
                length.prompt(tokens, seconds);
            }
            length
        };
        for (prompt, expected) in [
            // Of four rows it is only known that they cost no more than four steps.
            (None, 75),
            // The prompt has shown that sixteen cost no more than two, and is a part of the run.
            (Some((16, 2.0)), 23),
            (Some((160, 20.0)), 5),
            (Some((480, 60.0)), 1),
        ] {
            let found = patience(&mut begun(prompt));
            assert!(found.abs_diff(expected) <= 1, "{prompt:?}: {found}, expected {expected}");
        }
        // In the next run the cost is known, here that of sixteen rows.
        let mut length = begun(None);
        length.stepped(1.0);
        length.verified(15, 15, &StepTime { pass: 1.5, ..StepTime::default() });
        length.begin(Speculate::Auto, &[4, 16], true, false);
        assert!(patience(&mut length) <= 13);
    }

    #[test]
    fn a_fixed_draft_length_fits_the_widest_step() {
        let mut length = DraftLength::default();
        let mode = "6".parse().unwrap();
        length.begin(mode, &[4, 16], true, false);
        assert_eq!([0, 3, 20].map(|max_drafts| length.plan(max_drafts)), [0, 3, 6]);
        length.begin(mode, &[4], true, false);
        assert_eq!(length.plan(20), 3);
        length.begin(Speculate::Off, &[4], true, false);
        assert_eq!(length.plan(20), 0);
        length.begin(Speculate::Auto, &[], true, false);
        length.stepped(1.0);
        assert_eq!(length.plan(20), 0);
    }
}
