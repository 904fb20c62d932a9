//! Clusters of tokens: a drafting head scores them first, and only tokens of the best ones can be draft tokens.
//!
//! Arithmetic: `Gemma4AssistantMaskedEmbedder` of `transformers`. There the logits of the other tokens are not even
//! computed; here they are, and replaced.

use half::f16;
use serde::Deserialize;

use super::draft_graphs::DRAFT_HEAD;
use crate::fill::Embedding;
use qhx_op::{DType, Error, GraphId, Host, Result, View};

const PARAMS: &str = "/params/draft_head";
const ORDERING: &str = "/artifacts/draft_head/ordering";

/// `params.draft_head` of the manifest.
#[derive(Debug, Deserialize)]
struct Params {
    /// The clusters whose tokens keep their logits.
    top_clusters: usize,
}

/// Which tokens are in which cluster.
#[derive(Debug)]
pub(super) struct Clusters {
    /// The tokens of one cluster after those of another.
    tokens: Vec<u32>,
    /// Tokens of a cluster.
    size: usize,
    top: usize,
    scores: Vec<f32>,
    /// Numbers of the clusters, the best first.
    order: Vec<u32>,
    /// Logits that stay.
    kept: Vec<f32>,
}

impl Clusters {
    /// Reads the table `artifacts.draft_head.ordering`, where graphs have logits and scores of clusters.
    ///
    /// # Errors
    /// When some of the graphs have scores and others none, or the table is no permutation of the tokens.
    pub fn open(
        host: &mut Host,
        graphs: impl Iterator<Item = (GraphId, Option<View>, Option<View>)> + Clone,
    ) -> Result<Option<Self>> {
        let Some((_, Some(logits), Some(scores))) = graphs.clone().next() else { return Ok(None) };
        let sizes = |(_, l, s): &(GraphId, Option<View>, Option<View>)| {
            (l.map(|view| view.len), s.map(|view| view.len))
        };
        let alike = (Some(logits.len), Some(scores.len));
        if let Some((graph, ..)) = graphs.clone().find(|graph| sizes(graph) != alike) {
            return Err(Error::graph(format!(
                "graph {:?}: expected {} logits and {} centroids, as in the other graphs of manifest {DRAFT_HEAD}",
                host.graph(graph).name,
                logits.len,
                scores.len
            )));
        }
        let Params { top_clusters: top } = host.require(PARAMS)?;
        let (vocab, clusters) = (logits.len, scores.len);
        if !vocab.is_multiple_of(clusters.max(1)) || !(1..=clusters).contains(&top) {
            return Err(Error::manifest(format!(
                "manifest {PARAMS}/top_clusters: {top} of {clusters} clusters of {vocab} tokens, expected 1 to {clusters} \
                 of clusters that are equally large"
            )));
        }
        let size = vocab / clusters;
        let table = Embedding::open_at(host, ORDERING, size, Some(clusters))?;
        let (mut tokens, mut seen) = (Vec::with_capacity(vocab), vec![false; vocab]);
        let mut row = vec![0.0; size];
        for cluster in 0..clusters {
            table.read(host, cluster as u32, 0, &mut row)?;
            for &value in &row {
                // A number that is no index of `seen` finds none.
                let token = value as usize;
                let fresh = seen.get_mut(token).filter(|seen| !**seen && token as f32 == value);
                let Some(fresh) = fresh else {
                    return Err(Error::artifact(format!(
                        "manifest {ORDERING}: {value} in cluster {cluster} is no token or is there twice, expected each \
                         of the {vocab} tokens once"
                    )));
                };
                *fresh = true;
                tokens.push(token as u32);
            }
        }
        let order = (0..clusters as u32).collect();
        let kept = Vec::with_capacity(top * size);
        Ok(Some(Self { tokens, size, top, scores: vec![0.0; clusters], order, kept }))
    }

    /// Sets the logits of all tokens but those of the best clusters below the lowest of these, by 1. Allocates nothing.
    ///
    /// # Errors
    /// When the scores cannot be read.
    pub fn mask(&mut self, host: &mut Host, scores: View, logits: View) -> Result<()> {
        scores.to_f32(host, 0, &mut self.scores)?;
        let Self { tokens, size, top, scores, order, kept } = self;
        let score = |cluster: &u32| scores[*cluster as usize];
        let _ = order.select_nth_unstable_by(*top - 1, |a, b| score(b).total_cmp(&score(a)));
        let best = order[..*top].iter().flat_map(|cluster| {
            let first = *cluster as usize * *size;
            tokens[first..first + *size].iter().map(|token| *token as usize)
        });
        let first = logits.offset / logits.dtype.size();
        let place = first..first + logits.len;
        kept.clear();
        if logits.dtype == DType::F16 {
            let all = &mut host.f16s_mut(logits.buffer)[place];
            kept.extend(best.clone().map(|token| all[token].to_f32()));
            all.fill(f16::from_f32(below(kept)));
            best.zip(&*kept).for_each(|(token, value)| all[token] = f16::from_f32(*value));
        } else {
            let all = &mut host.f32s_mut(logits.buffer)[place];
            kept.extend(best.clone().map(|token| all[token]));
            all.fill(below(kept));
            best.zip(&*kept).for_each(|(token, value)| all[token] = *value);
        }
        Ok(())
    }
}

/// The logit of a token that is in none of the best clusters.
fn below(kept: &[f32]) -> f32 {
    kept.iter().copied().fold(f32::INFINITY, f32::min) - 1.0
}
