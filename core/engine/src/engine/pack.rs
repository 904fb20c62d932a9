//! Which texts go through an encoder's graphs together.
//!
//! A graph computes all of its rows, whatever it is given. So the texts of a window are laid into graphs of each length
//! by first-fit decreasing (Johnson 1974: at most 11/9 of the fewest graphs, and some), each graph is replaced by the
//! shortest that holds its texts, and of these plans the cheapest is taken. The result depends on the texts alone.

use std::cmp::Reverse;

use crate::op::{Bucket, Packing};

/// Rows of the longest graph that packs are found for at a time. More texts fill graphs better, and whoever waits for
/// the first vector waits longer.
const WINDOW: usize = 4;

/// A session's way from texts to vectors.
pub(super) struct Embeddings {
    pub packer: Packer,
    /// Vectors of the last execution.
    pub last: Vec<f32>,
}

impl Embeddings {
    pub(super) fn new(packing: &Packing) -> Self {
        Self { packer: Packer::new(&packing.buckets), last: Vec::new() }
    }
}

/// Finds packs: texts for one execution.
#[derive(Debug, Clone, Default)]
pub(super) struct Packer {
    /// The shortest first.
    buckets: Vec<Bucket>,
}

/// Texts for one execution, by their index in the window.
struct Pack {
    texts: Vec<usize>,
    tokens: usize,
    /// Tokens that it may have.
    room: usize,
}

impl Packer {
    /// Packer for graphs that take several texts, the shortest first.
    pub fn new(buckets: &[Bucket]) -> Self {
        Self { buckets: buckets.to_vec() }
    }

    /// Tokens of a window; 0 where no texts go together.
    pub fn window_tokens(&self) -> usize {
        self.buckets.last().map_or(0, |bucket| bucket.rows.saturating_mul(WINDOW))
    }

    /// Number of texts, given by their tokens, in a window: as many as make up its tokens, at least one.
    pub fn window(&self, lengths: impl Iterator<Item = usize>) -> usize {
        let (max_tokens, mut tokens, mut count) = (self.window_tokens(), 0usize, 0);
        for length in lengths {
            count += 1;
            // An empty text is an error when its turn comes; until then it counts as one token.
            tokens = tokens.saturating_add(length.max(1));
            if tokens >= max_tokens {
                break;
            }
        }
        count
    }

    /// Divides the texts of a window, given by their tokens, into packs. A text that no bucket holds, and an empty one,
    /// is a pack by itself.
    pub fn plan(&self, lengths: &[usize]) -> Vec<Vec<usize>> {
        let mut order: Vec<usize> = (0..lengths.len()).collect();
        order.sort_by_key(|&text| Reverse(lengths[text]));
        // Without room for a second text each is alone: that is the plan to beat.
        let rooms = std::iter::once(0).chain(self.buckets.iter().map(|bucket| bucket.rows));
        let plans = rooms.map(|room| self.fill(room, &order, lengths));
        let cost = |plan: &Vec<Pack>| plan.iter().map(|pack| self.cost(pack)).sum::<f64>();
        let best = plans.min_by(|a, b| cost(a).total_cmp(&cost(b))).unwrap_or_default();
        best.into_iter().map(|pack| pack.texts).collect()
    }

    /// Lays texts, the longest first, into graphs of `room` rows, or of as many as a longer text needs.
    fn fill(&self, room: usize, order: &[usize], lengths: &[usize]) -> Vec<Pack> {
        let mut packs: Vec<Pack> = Vec::new();
        for &text in order {
            let tokens = lengths[text];
            let open =
                packs.iter_mut().find(|pack| tokens > 0 && pack.room - pack.tokens >= tokens);
            if let Some(pack) = open {
                pack.texts.push(text);
                pack.tokens += tokens;
                continue;
            }
            let room = match self.bucket(tokens) {
                Some(bucket) if tokens > 0 && room > 0 => room.max(bucket.rows),
                _ => tokens,
            };
            packs.push(Pack { texts: vec![text], tokens, room });
        }
        packs
    }

    /// The graphs that n tokens go through: the shortest that hold them.
    fn bucket(&self, tokens: usize) -> Option<&Bucket> {
        self.buckets.iter().find(|bucket| bucket.rows >= tokens)
    }

    /// Cost of a pack. One that no bucket holds is in every plan.
    fn cost(&self, pack: &Pack) -> f64 {
        self.bucket(pack.tokens).map_or(0.0, |bucket| bucket.cost)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn packer(buckets: &[(usize, f64)]) -> Packer {
        let bucket = |&(rows, cost): &(usize, f64)| Bucket { rows, cost };
        Packer { buckets: buckets.iter().map(bucket).collect() }
    }

    /// Tokens of each text of each pack, and what the plan costs.
    fn planned(packer: &Packer, lengths: &[usize]) -> (Vec<Vec<usize>>, f64) {
        let plan = packer.plan(lengths);
        let mut seen: Vec<usize> = plan.iter().flatten().copied().collect();
        seen.sort_unstable();
        assert_eq!(seen, (0..lengths.len()).collect::<Vec<_>>(), "each text once");
        let tokens: Vec<Vec<usize>> =
            plan.iter().map(|pack| pack.iter().map(|&text| lengths[text]).collect()).collect();
        let longest = packer.buckets.last().map_or(0, |bucket| bucket.rows);
        for pack in tokens.iter().filter(|pack| pack.len() > 1) {
            assert!(pack.iter().sum::<usize>() <= longest && !pack.contains(&0), "{pack:?}");
        }
        let cost = |pack: &Vec<usize>| packer.bucket(pack.iter().sum()).map_or(0.0, |b| b.cost);
        let cost = tokens.iter().map(cost).sum();
        (tokens, cost)
    }

    #[test]
    fn texts_share_graphs_where_that_is_cheaper() {
        // The NPU: a graph of 128 rows costs twice one of 32. The CPU: it costs four times as much.
        let (npu, cpu) = (packer(&[(32, 1.0), (128, 2.0)]), packer(&[(32, 1.0), (128, 4.0)]));
        assert_eq!(planned(&npu, &[20; 6]), (vec![vec![20; 6]], 2.0));
        assert_eq!(planned(&cpu, &[10; 6]), (vec![vec![10; 3]; 2], 2.0));
        // Six of 20 tokens fill 128 rows; in graphs of 32 each needs one.
        assert_eq!(planned(&cpu, &[20; 6]).1, 4.0);
        // What is left over goes through the shortest graphs that hold it.
        assert_eq!(planned(&npu, &[60, 60, 9, 60, 60]).1, 5.0);
        assert_eq!(planned(&cpu, &[128, 5]), (vec![vec![128], vec![5]], 5.0));
        // A wide graph that costs more than its rows are worth is left to long texts.
        let dear = packer(&[(32, 1.0), (128, 9.0)]);
        assert_eq!(planned(&dear, &[16; 8]), (vec![vec![16; 2]; 4], 4.0));
    }

    #[test]
    fn no_plan_costs_more_than_each_text_alone() {
        let mut state = 9u64;
        let mut next = |below: u64| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            (state >> 33) % below
        };
        for _ in 0..300 {
            let costs = [1.0, 1.0 + next(8) as f64 / 2.0, 2.0 + next(40) as f64 / 2.0];
            let packer = packer(&[(32, costs[0]), (128, costs[1]), (512, costs[2])]);
            let lengths: Vec<usize> = (0..next(60)).map(|_| next(513) as usize).collect();
            let alone = |&length: &usize| packer.bucket(length).map_or(0.0, |b| b.cost);
            let alone: f64 = lengths.iter().map(alone).sum();
            assert!(planned(&packer, &lengths).1 <= alone + 1e-9, "{lengths:?}, {costs:?}");
        }
    }

    #[test]
    fn texts_that_do_not_pack_go_one_at_a_time() {
        let npu = packer(&[(32, 1.0), (128, 2.0)]);
        assert_eq!(planned(&npu, &[0, 5, 129, 6, 0]).0, [vec![129], vec![6, 5], vec![0], vec![0]]);
        assert_eq!(planned(&packer(&[]), &[3, 4]).0, [[4], [3]]);
        assert!(npu.plan(&[]).is_empty());
        // A window ends with the text that makes up four times the longest graph's tokens.
        assert_eq!(npu.window([200, 200, 112, 1].into_iter()), 3);
        assert_eq!(npu.window([9999, 1].into_iter()), 1);
        assert_eq!(npu.window(std::iter::repeat_n(0, 10_000)), 512);
        assert_eq!(packer(&[]).window([3, 4].into_iter()), 1);
    }
}
