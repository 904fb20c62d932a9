//! How many tokens are guessed: as many as pay.
//!
//! A step of several rows costs more than a plain one, how much more is measured while the run lasts. With an acceptance
//! rate α it gives (1 − αⁿ⁺¹) / (1 − α) tokens for n guesses on average (Leviathan et al. 2023, equation 1). The n with
//! the most tokens a second is taken, if that is more than plain steps give.
//!
//! So that a run never gets slower than plain decoding by more than [`SHARE`], there is an account: the prompt adds that
//! share of its time, each token that share of a plain step, and each step of several rows what it saved or lost. One is
//! made only where the account covers the worst case, one token for all of its cost. What a step of so many rows costs
//! at most is known before the first one: what as many plain steps cost, or one of more rows, or the prompt. After the
//! first run of a model the cost itself is known, so that later ones guess from their beginning on.

use crate::engine::types::Speculate;

/// How much slower than plain decoding a run may get.
const SHARE: f64 = 0.04;
/// Weight of a new measurement in a mean.
const NEW: f64 = 0.25;
/// What an earlier trial counts beside the next one.
const FADE: f64 = 0.95;
/// Acceptance rate before there are trials.
const HOPED: f64 = 0.7;
/// What is left of a cost that was found too high after a plain step: it is tried again some day.
const FORGET: f64 = 0.99;

/// Seconds of a step of so many rows.
#[derive(Debug, Clone, Copy, Default)]
struct Cost {
    /// Measured: rows and their logits.
    pass: Option<f64>,
    /// Measured: what keeping only some of the tokens takes.
    again: Option<f64>,
    /// The most that it can be, as far as the prompt told.
    bound: Option<f64>,
}

/// Decides on the number of guesses.
#[derive(Debug, Default)]
pub(super) struct Pace {
    mode: Speculate,
    /// Rows of steps, ascending, and what they cost.
    widths: Vec<(usize, Cost)>,
    /// A part of the tokens goes through the graphs again where only they are kept.
    repeats: bool,
    plain: Option<f64>,
    /// Seconds of a guess.
    guess: Option<f64>,
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
    *old = Some(old.map_or(new, |old| old + NEW * (new - old)));
}

impl Pace {
    /// A run begins. `free`: guesses cost nothing. `repeats`: see [`Pace`]. What was measured before stays.
    pub fn begin(&mut self, mode: Speculate, widths: &[usize], free: bool, repeats: bool) {
        if !self.widths.iter().map(|(width, _)| width).eq(widths) {
            self.widths.clear();
            self.widths.extend(widths.iter().map(|&width| (width, Cost::default())));
        }
        (self.mode, self.free, self.repeats) = (mode, free, repeats);
        (self.account, self.idle) = (0.0, 0);
        (self.hits, self.trials) = (self.hits * 0.3, self.trials * 0.3);
    }

    /// A prompt took `seconds` for so many tokens: no step of as many rows takes longer. It is a part of the run that is
    /// not to get slower.
    pub fn prompt(&mut self, tokens: usize, seconds: f64) {
        self.account += SHARE * seconds;
        let widest = self.widest().max(1);
        let each = seconds / (tokens / widest).max(1) as f64;
        for (width, cost) in &mut self.widths {
            cost.bound = (*width <= tokens).then_some(each);
        }
    }

    /// Most rows of a step.
    pub fn widest(&self) -> usize {
        self.widths.last().map_or(0, |(width, _)| *width)
    }

    fn rate(&self) -> f64 {
        (self.hits + HOPED) / (self.trials + 1.0)
    }

    /// How many of at most `most` tokens to guess; 0 for a plain step.
    pub fn plan(&self, most: usize) -> usize {
        let most = most.min(self.widest().saturating_sub(1));
        match self.mode {
            Speculate::Off => 0,
            Speculate::Tokens(count) => most.min(count.get()),
            Speculate::Auto => self.plain.map_or(0, |plain| self.best(most, plain)),
        }
    }

    fn best(&self, most: usize, plain: f64) -> usize {
        let rate = self.rate();
        let forgotten = FORGET.powi(self.idle);
        // A draft's step takes less than a plain one, or it would be none.
        let most_guess = if self.free { 0.0 } else { self.guess.unwrap_or(plain) };
        let guess = if self.free { 0.0 } else { self.guess.unwrap_or(0.0) * forgotten };
        let (mut best, mut found, mut guesses) = (1.0 / plain, 0, 1);
        for (index, (width, cost)) in self.widths.iter().enumerate() {
            // A step costs at most what as many plain ones do, and what one of more rows does.
            let wider = self.widths[index..].iter().filter_map(|(_, wider)| wider.pass);
            let wider = wider.fold(cost.bound.unwrap_or(f64::INFINITY), f64::min);
            let bound = (*width as f64 * plain).min(wider);
            let worst = cost.pass.unwrap_or(bound);
            let again = if self.repeats { cost.again.unwrap_or(bound) } else { 0.0 };
            // What was never tried may be as cheap as a plain step.
            let pass = cost.pass.map_or(plain, |pass| (pass * forgotten).max(plain.min(pass)));
            while guesses < *width && guesses <= most {
                let all = rate.powi(guesses as i32);
                let tokens = (1.0 - all * rate) / (1.0 - rate).max(1e-9);
                let guessing = guesses as f64 * guess;
                let expected = pass + guessing + (1.0 - all) * again * forgotten;
                let lost = worst + again + guesses as f64 * most_guess - plain;
                let covered = lost <= self.account;
                if covered && tokens / expected > best {
                    (best, found) = (tokens / expected, guesses);
                }
                guesses += 1;
            }
        }
        found
    }

    /// A plain step took so long.
    pub fn stepped(&mut self, seconds: f64) {
        mean(&mut self.plain, seconds);
        self.account += SHARE * self.plain.unwrap_or(0.0);
        self.idle = self.idle.saturating_add(1);
        if !self.free {
            // Nothing else tells whether the text has become easier to guess.
            (self.hits, self.trials) = (self.hits * FORGET, self.trials * FORGET);
        }
    }

    /// Whether a guess was right that was not part of a step.
    pub fn compared(&mut self, right: bool) {
        self.try_one(right);
    }

    fn try_one(&mut self, right: bool) {
        self.hits = self.hits * FADE + f64::from(u8::from(right));
        self.trials = self.trials * FADE + 1.0;
    }

    /// A step checked `guessed` tokens, of which `accepted` were right.
    pub fn passed(&mut self, guessed: usize, accepted: usize, took: &Took) {
        for index in 0..guessed.min(accepted + 1) {
            self.try_one(index < accepted);
        }
        self.idle = 0;
        if let Some((_, cost)) = self.widths.iter_mut().find(|(width, _)| guessed < *width) {
            mean(&mut cost.pass, took.pass);
            if accepted < guessed {
                mean(&mut cost.again, took.keep);
            }
        }
        if guessed > 0 {
            mean(&mut self.guess, took.guess / guessed as f64);
        }
        let tokens = (accepted + 1) as f64;
        let saved = tokens * self.plain.unwrap_or(0.0) * (1.0 + SHARE);
        self.account += saved - (took.pass + took.keep + took.guess);
    }
}

/// Seconds that a step of several rows took.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Took {
    /// Making the guesses.
    pub guess: f64,
    /// The rows and their logits.
    pub pass: f64,
    /// Keeping those that were right.
    pub keep: f64,
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sampling::Rng;

    /// A run of `tokens` tokens where a plain step takes a second, one of `widths` rows so long, a guess is right
    /// with `rate`, and keeping a part takes `again`. Answers with its seconds and the number of steps with guesses.
    fn simulate(
        tokens: usize,
        widths: &[(usize, f64)],
        rate: impl Fn(usize) -> f64,
        again: f64,
        guess: f64,
    ) -> (f64, usize) {
        let mut pace = Pace::default();
        let rows: Vec<_> = widths.iter().map(|(width, _)| *width).collect();
        pace.begin(Speculate::Auto, &rows, guess == 0.0, again > 0.0);
        let mut rng = Rng::new(3);
        let (mut done, mut seconds, mut passes) = (0, 0.0, 0);
        while done < tokens {
            let mut right = || (rng.below(1 << 20) as f64) < rate(done) * f64::from(1 << 20);
            let count = pace.plan(tokens - done - 1);
            if count == 0 {
                pace.stepped(1.0);
                if guess == 0.0 {
                    pace.compared(right());
                }
                (done, seconds) = (done + 1, seconds + 1.0);
                continue;
            }
            let accepted = (0..count).take_while(|_| right()).count();
            let pass = widths.iter().find(|(width, _)| count < *width).unwrap().1;
            let keep = if accepted < count { again } else { 0.0 };
            let took = Took { guess: guess * count as f64, pass, keep };
            pace.passed(count, accepted, &took);
            seconds += took.guess + took.pass + took.keep;
            (done, passes) = (done + accepted + 1, passes + 1);
        }
        (seconds, passes)
    }

    #[test]
    fn no_run_gets_slower_than_plain_by_more_than_a_twentieth() {
        for tokens in [1, 5, 20, 100, 1000, 5000] {
            for widths in [&[(4, 1.05)][..], &[(4, 1.5), (16, 3.0)], &[(16, 9.0)], &[(128, 90.0)]] {
                for rate in [0.0, 0.1, 0.5, 0.9, 1.0] {
                    for (again, guess) in [(0.0, 0.0), (1.1, 0.0), (0.0, 0.2), (9.0, 0.9)] {
                        let (seconds, _) = simulate(tokens, widths, |_| rate, again, guess);
                        let limit = 1.05 * tokens as f64;
                        let case = (tokens, widths, rate, again, guess);
                        assert!(seconds <= limit, "{case:?}: {seconds} s, plain {tokens} s");
                    }
                }
            }
        }
    }

    #[test]
    fn guessing_pays_where_it_can_and_comes_back() {
        let cheap = [(4, 1.05), (16, 1.2)];
        let seconds = |rate: f64| simulate(1000, &cheap, |_| rate, 0.0, 0.0).0;
        assert!(
            seconds(0.95) < 200.0 && seconds(0.5) < 650.0,
            "{} {}",
            seconds(0.95),
            seconds(0.5)
        );
        // A draft costs a tenth of a step for each guess.
        let (draft, _) = simulate(1000, &cheap, |_| 0.8, 0.0, 0.1);
        assert!(draft < 600.0, "{draft}");
        // Nothing can be guessed at first, and then everything.
        let later = |done: usize| if done < 500 { 0.0 } else { 0.98 };
        for guess in [0.0, 0.1] {
            let (seconds, _) = simulate(1500, &[(8, 2.5)], later, 0.0, guess);
            assert!(seconds < 1250.0, "{guess}: {seconds}");
        }
        // A step that costs sixteen plain ones is not for texts of this kind. Only trying tells.
        let (_, tries) = simulate(1000, &[(16, 16.0)], |_| 0.5, 0.0, 0.0);
        assert!(tries <= 2, "{tries}");
    }

    /// Plain steps before the first guess is checked, of tokens that are always guessed right.
    fn patience(pace: &mut Pace) -> usize {
        let waits = |_: &usize| {
            let waits = pace.plan(3) == 0;
            if waits {
                pace.stepped(1.0);
                pace.compared(true);
            }
            waits
        };
        (0..1000).take_while(waits).count()
    }

    #[test]
    fn the_first_guess_comes_the_sooner_the_more_is_known() {
        let begun = |prompt: Option<(usize, f64)>| {
            let mut pace = Pace::default();
            pace.begin(Speculate::Auto, &[4, 16], true, false);
            if let Some((tokens, seconds)) = prompt {
                pace.prompt(tokens, seconds);
            }
            pace
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
        let mut pace = begun(None);
        pace.stepped(1.0);
        pace.passed(15, 15, &Took { pass: 1.5, ..Took::default() });
        pace.begin(Speculate::Auto, &[4, 16], true, false);
        assert!(patience(&mut pace) <= 13);
    }

    #[test]
    fn a_fixed_number_is_kept_within_what_a_step_takes() {
        let mut pace = Pace::default();
        let mode = "6".parse().unwrap();
        pace.begin(mode, &[4, 16], true, false);
        assert_eq!([0, 3, 20].map(|most| pace.plan(most)), [0, 3, 6]);
        pace.begin(mode, &[4], true, false);
        assert_eq!(pace.plan(20), 3);
        pace.begin(Speculate::Off, &[4], true, false);
        assert_eq!(pace.plan(20), 0);
        pace.begin(Speculate::Auto, &[], true, false);
        pace.stepped(1.0);
        assert_eq!(pace.plan(20), 0);
    }
}
