//! Which graphs the tokens of a prompt go through: the cheapest set of steps.

/// Prompts longer than this begin with the pass that costs least for a token; the rest is planned exactly.
const PLANNED: usize = 4096;

/// Cost of a pass, in a unit that is the same for all passes of a decoder.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct PassCost {
    /// Maximum number of tokens.
    pub rows: usize,
    /// It takes as many tokens as it has rows, no fewer.
    pub only_full: bool,
    /// It takes the first tokens of a text alone.
    pub begins: bool,
    /// It gives logits, so that the last token of a prompt may be among its own.
    pub logits: bool,
    /// Cost of its graphs when nobody wants logits.
    pub fill: f64,
    /// Cost of all of its graphs.
    pub whole: f64,
}

/// The cheapest passes for any number of tokens, worked out once when a decoder is opened. Asking for the next one is
/// a look into a table.
#[derive(Debug)]
pub(super) struct PrefillPlan {
    /// Index of the pass that begins what is cheapest for n tokens; nothing stands for 0 tokens.
    first: Vec<u16>,
    /// The same where the next token is a text's first, for passes that take those alone; empty where there is none.
    begin: Vec<u16>,
    /// For more tokens than that: the pass with the lowest cost of a row.
    steady: usize,
    rows: Vec<usize>,
    logits: Vec<bool>,
    only_full: Vec<bool>,
    begins: Vec<bool>,
}

impl PrefillPlan {
    /// Plans prompts of up to `longest` tokens over `costs`, of which the first takes one token and gives logits.
    ///
    /// Exact up to [`PLANNED`] tokens, by dynamic programming: what is cheapest for n tokens begins with some pass and
    /// goes on with what is cheapest for those that remain. A pass that is not full takes all that remain, or all but
    /// the last where it gives no logits. Equal costs are decided for the wider pass.
    pub fn plan(costs: &[PassCost], longest: usize) -> Self {
        let widest = costs.iter().map(|cost| cost.rows).max().unwrap_or(1);
        let planned = longest.min(PLANNED.max(widest.saturating_mul(2)));
        let mut cheapest = Vec::with_capacity(planned.saturating_add(1));
        cheapest.push(0.0);
        let mut first = Vec::with_capacity(planned.saturating_add(1));
        first.push(0);
        let better = |best: (u16, f64), left: usize, begins: bool, cheapest: &[f64]| {
            let passes = (0..).zip(costs).filter(|(_, cost)| cost.begins == begins);
            passes.fold(best, |best, (index, cost)| {
                let Some(count) = take(cost, left) else { return best };
                let now = if count == left { cost.whole } else { cost.fill };
                let all = now + cheapest[left - count];
                if all <= best.1 { (index, all) } else { best }
            })
        };
        for left in 1..=planned {
            let best = better((0, f64::INFINITY), left, false, &cheapest);
            first.push(best.0);
            cheapest.push(best.1);
        }
        let begin = match costs.iter().any(|cost| cost.begins) {
            true => (0..=planned)
                .map(|left| better((first[left], cheapest[left]), left, true, &cheapest).0)
                .collect(),
            false => Vec::new(),
        };
        let a_row = |cost: &PassCost| cost.fill / cost.rows.max(1) as f64;
        let going_on = costs.iter().enumerate().filter(|(_, cost)| !cost.begins);
        let steady = going_on.min_by(|(_, a), (_, b)| a_row(a).total_cmp(&a_row(b)));
        Self {
            first,
            begin,
            steady: steady.map_or(0, |(index, _)| index),
            rows: costs.iter().map(|cost| cost.rows).collect(),
            logits: costs.iter().map(|cost| cost.logits).collect(),
            only_full: costs.iter().map(|cost| cost.only_full).collect(),
            begins: costs.iter().map(|cost| cost.begins).collect(),
        }
    }

    /// The pass for the next step when `left` tokens remain, at least one, and how many of them it takes. `begins`: the
    /// next token is a text's first.
    pub fn next(&self, left: usize, begins: bool) -> (usize, usize) {
        let pass = match self.begin.last() {
            Some(last) if begins => Some(self.begin.get(left).unwrap_or(last)),
            _ => self.first.get(left),
        };
        let pass = pass.map_or(self.steady, |&pass| usize::from(pass));
        let rows = self.rows.get(pass).copied().unwrap_or(1);
        let gives = self.logits.get(pass).copied().unwrap_or(true);
        let all = if gives { left } else { left.saturating_sub(1).max(1) };
        (pass, all.min(rows))
    }

    /// The narrowest pass that takes `count` tokens in one step, of which the last has to give logits where `last`;
    /// none where there is no such pass.
    pub fn taking(&self, count: usize, last: bool) -> Option<usize> {
        let takes = |pass: &usize| match self.only_full.get(*pass) {
            Some(true) => self.rows[*pass] == count,
            _ => self.rows[*pass] >= count,
        };
        let goes_on = |pass: &usize| !self.begins[*pass];
        (0..self.rows.len()).filter(goes_on).filter(takes).find(|pass| !last || self.logits[*pass])
    }

    /// The most tokens that a step takes.
    pub fn widest(&self) -> usize {
        self.rows.iter().copied().max().unwrap_or(0)
    }
}

/// Number of the `left` tokens that a pass can take next.
fn take(cost: &PassCost, left: usize) -> Option<usize> {
    let all = if cost.logits { left } else { left - 1 };
    let count = all.min(cost.rows);
    (count > 0 && (count == cost.rows || !cost.only_full)).then_some(count)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::graphs::assumed;

    fn pass(rows: usize, cost: f64) -> PassCost {
        PassCost { rows, only_full: false, begins: false, logits: true, fill: cost, whole: cost }
    }

    /// Rows of the passes that `tokens` go through, and tokens in each.
    fn steps(costs: &[PassCost], tokens: usize) -> Vec<(usize, usize)> {
        let passes = PrefillPlan::plan(costs, 10_000);
        let (mut left, mut steps) = (tokens, Vec::new());
        while left > 0 {
            let (pass, count) = passes.next(left, left == tokens);
            assert!(count > 0 && count <= costs[pass].rows, "{count} of {left} by {pass}");
            assert!(!costs[pass].begins || left == tokens, "{pass} does not go on");
            left -= count;
            steps.push((costs[pass].rows, count));
        }
        steps
    }

    fn total(costs: &[PassCost], steps: &[(usize, usize)]) -> f64 {
        let of = |rows| costs.iter().find(|cost| cost.rows == rows).unwrap();
        let (last, before) = steps.split_last().unwrap();
        before.iter().map(|(rows, _)| of(*rows).fill).sum::<f64>() + of(last.0).whole
    }

    #[test]
    fn a_short_prompt_goes_by_steps_where_a_wide_graph_costs_more() {
        // Milliseconds on a CPU: a step, and graphs of 16 and 128 rows.
        let cpu = [pass(1, 73.0), pass(16, 130.0), pass(128, 650.0)];
        assert_eq!(steps(&[cpu[0], cpu[2]], 3), [(1, 1); 3]);
        assert_eq!(steps(&[cpu[0], cpu[2]], 9), [(128, 9)]);
        assert_eq!(steps(&cpu, 1), [(1, 1)]);
        assert_eq!(steps(&cpu, 3), [(16, 3)]);
        assert_eq!(steps(&cpu, 17), [(16, 16), (1, 1)]);
        assert_eq!(steps(&cpu, 40), [(16, 16), (16, 16), (16, 8)]);
        assert_eq!(steps(&cpu, 130), [(128, 128), (16, 2)]);
        // The NPU, as its compiler estimates it: 128 rows cost little more than one.
        let npu = [pass(1, 748.0), pass(16, 915.0), pass(128, 1737.0)];
        assert_eq!(steps(&npu, 2), [(16, 2)]);
        assert_eq!(steps(&npu, 33), [(128, 33)]);
        assert_eq!(steps(&npu, 129), [(128, 128), (1, 1)]);
        assert_eq!(steps(&npu, 150), [(128, 128), (128, 22)]);
    }

    #[test]
    fn a_text_begins_with_graphs_without_caches_where_that_pays() {
        let begins = |rows, cost| PassCost { begins: true, ..pass(rows, cost) };
        let published = [pass(1, 1.0), begins(576, assumed(576))];
        assert_eq!(steps(&published, 18), [(1, 1); 18]);
        assert_eq!(steps(&published, 24), [(576, 24)]);
        assert_eq!(steps(&published, 578), [(576, 576), (1, 1), (1, 1)]);
        assert_eq!(steps(&published, 9_000)[..2], [(576, 576), (1, 1)]);
        let both = [pass(1, 1.0), begins(16, 1.2), pass(16, 1.5)];
        assert_eq!(steps(&both, 40), [(16, 16), (16, 16), (16, 8)]);
        let first = PrefillPlan::plan(&both, 100);
        assert_eq!((first.next(40, true).0, first.next(40, false).0), (1, 2));
    }

    #[test]
    fn no_other_set_of_passes_is_cheaper() {
        // All orders of up to seven steps, some graphs of which take only full chunks or give no logits.
        let sets = [
            vec![pass(1, 1.0), pass(3, 1.7), pass(8, 4.1)],
            vec![pass(1, 1.0), PassCost { only_full: true, ..pass(3, 1.2) }, pass(5, 2.3)],
            vec![pass(1, 3.0), PassCost { logits: false, fill: 1.5, ..pass(4, 9.0) }],
            vec![PassCost { fill: 0.5, ..pass(1, 2.0) }, PassCost { fill: 1.0, ..pass(4, 2.2) }],
        ];
        fn min_cost(costs: &[PassCost], left: usize) -> f64 {
            let mut best = f64::INFINITY;
            for cost in costs {
                for count in 1..=cost.rows.min(left) {
                    if count < cost.rows && cost.only_full || count == left && !cost.logits {
                        continue;
                    }
                    let rest = if count == left { 0.0 } else { min_cost(costs, left - count) };
                    best = best.min(rest + if count == left { cost.whole } else { cost.fill });
                }
            }
            best
        }
        for costs in sets {
            for tokens in 1..=13 {
                let found = total(&costs, &steps(&costs, tokens));
                let expected = min_cost(&costs, tokens);
                assert!(
                    (found - expected).abs() < 1e-9,
                    "{costs:?}, {tokens}: {found}, {expected}"
                );
            }
        }
    }

    #[test]
    fn a_prompt_is_consumed_in_the_widest_steps_that_pay() {
        let costs = [pass(1, 1.0), pass(16, assumed(16)), pass(128, assumed(128))];
        let long = steps(&costs, 9_999);
        assert_eq!(long.iter().map(|(_, count)| count).sum::<usize>(), 9_999);
        assert_eq!(long.iter().filter(|(rows, _)| *rows == 128).count(), 78);
        // Graphs that cost a row as much as a step are left alone.
        assert_eq!(steps(&[pass(1, 1.0), pass(4, 4.5)], 4), [(1, 1); 4]);
    }
}
