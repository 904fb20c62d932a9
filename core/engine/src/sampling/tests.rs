//! The sampler against a naive implementation in double precision.

use half::f16;

use super::*;

/// Beyond the cap all logits are nearly the same score, so that any of them may be drawn; the most likely stays the
/// most likely, and a penalty that would mean little among the logits counts among the scores.
#[test]
fn a_softcap_flattens_what_is_drawn_and_keeps_the_most_likely() {
    let logits = [0.0, 400.0, 300.0, 200.0];
    let sampler = |temperature, repetition_penalty, cap| {
        let params = SamplingParams::default().temperature(temperature).seed(3);
        let params = params.repetition_penalty(repetition_penalty);
        Sampler::new(params, logits.len()).unwrap().softcapped(cap)
    };
    let mut drawn = [0; 4];
    let mut capped = sampler(1.0, 1.0, Some(30.0));
    for _ in 0..300 {
        drawn[capped.sample(Logits::F32(&logits)).unwrap() as usize] += 1;
    }
    assert!(drawn[0] == 0 && drawn[1..].iter().all(|&n| n > 60), "{drawn:?}");
    let mut plain = sampler(1.0, 1.0, None);
    assert!((0..50).all(|_| plain.sample(Logits::F32(&logits)).unwrap() == 1));
    for (penalty, cap, expected) in [(1.0, Some(30.0), 1), (1.1, Some(30.0), 2), (1.1, None, 1)] {
        let mut greedy = sampler(0.0, penalty, cap);
        greedy.accept(1);
        assert_eq!(greedy.sample(Logits::F32(&logits)).unwrap(), expected, "{penalty} {cap:?}");
    }
}

/// Probabilities after every step of `transformers`, by full sorts in `f64`.
fn reference(params: &SamplingParams, logits: &[f32], prompt: &[u32], answer: &[u32]) -> Vec<f64> {
    let mut scores: Vec<f64> = logits.iter().map(|&v| f64::from(v)).collect();
    let seen: Vec<(u32, bool)> =
        prompt.iter().map(|&t| (t, false)).chain(answer.iter().map(|&t| (t, true))).collect();
    let from = match params.penalty_window {
        0 => 0,
        window => seen.len().saturating_sub(window),
    };
    let seen = &seen[from..];
    for (token, score) in scores.iter_mut().enumerate() {
        let count = seen.iter().filter(|(t, a)| *t as usize == token && *a).count() as f64;
        if seen.iter().any(|(t, _)| *t as usize == token) {
            let penalty = f64::from(params.repetition_penalty);
            *score = if *score < 0.0 { *score * penalty } else { *score / penalty };
        }
        *score -= count * f64::from(params.frequency_penalty);
        *score -= if count > 0.0 { f64::from(params.presence_penalty) } else { 0.0 };
    }
    if params.temperature == 0.0 {
        let best = (0..scores.len()).rev().max_by(|&a, &b| scores[a].total_cmp(&scores[b]));
        return (0..scores.len()).map(|i| f64::from(u8::from(Some(i) == best))).collect();
    }
    for score in &mut scores {
        *score /= f64::from(params.temperature);
    }
    let mut order: Vec<usize> = (0..scores.len()).collect();
    order.sort_by(|&a, &b| scores[b].total_cmp(&scores[a]).then(a.cmp(&b)));
    if params.top_k > 0 && params.top_k < scores.len() {
        let kth = scores[order[params.top_k - 1]];
        scores.iter_mut().filter(|s| **s < kth).for_each(|s| *s = f64::NEG_INFINITY);
    }
    let softmax = |scores: &[f64]| {
        let max = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let exps: Vec<f64> = scores.iter().map(|s| (s - max).exp()).collect();
        let sum: f64 = exps.iter().sum();
        exps.into_iter().map(|e| e / sum).collect::<Vec<_>>()
    };
    let probabilities = softmax(&scores);
    let mut above = 0.0;
    for (rank, &token) in order.iter().enumerate() {
        if rank > 0 && above >= f64::from(params.top_p) && params.top_p < 1.0 {
            scores[token] = f64::NEG_INFINITY;
        }
        above += probabilities[token];
    }
    let probabilities = softmax(&scores);
    let min_probability =
        f64::from(params.min_p) * probabilities.iter().copied().fold(0.0, f64::max);
    for (score, p) in scores.iter_mut().zip(&probabilities) {
        if *p < min_probability {
            *score = f64::NEG_INFINITY;
        }
    }
    softmax(&scores)
}

fn noise(rng: &mut Rng, count: usize) -> Vec<f32> {
    (0..count).map(|_| (rng.below(16000) as f32 / 1000.0) - 8.0).collect()
}

#[test]
fn every_combination_draws_from_the_reference_distribution() {
    let mut rng = Rng::new(5);
    let mut failures = Vec::new();
    for round in 0..60 {
        let vocab = [7, 64, 65, 300][round % 4];
        let logits = noise(&mut rng, vocab);
        let pick = |rng: &mut Rng, values: &[f32]| values[rng.below(values.len() as u64) as usize];
        let params = SamplingParams {
            temperature: pick(&mut rng, &[0.5, 1.0, 3.0]),
            top_k: [0, 1, 5, 40, 299][rng.below(5) as usize],
            top_p: pick(&mut rng, &[1.0, 0.95, 0.5, 0.05]),
            min_p: pick(&mut rng, &[0.0, 0.0, 0.1, 0.9]),
            repetition_penalty: pick(&mut rng, &[1.0, 1.3, 0.8]),
            presence_penalty: pick(&mut rng, &[0.0, 0.7]),
            frequency_penalty: pick(&mut rng, &[0.0, -0.4]),
            penalty_window: [0, 3][rng.below(2) as usize],
            seed: Some(round as u64),
            ..SamplingParams::default()
        };
        let tokens: Vec<_> = (0..8).map(|_| rng.below(vocab as u64) as u32).collect();
        let expected = reference(&params, &logits, &tokens[..4], &tokens[4..]);
        let mut sampler = Sampler::new(params.clone(), vocab).unwrap();
        sampler.accept_prompt(&tokens[..4]);
        tokens[4..].iter().for_each(|&t| sampler.accept(t));
        let draws = 4000;
        let mut counts = vec![0f64; vocab];
        for _ in 0..draws {
            counts[sampler.sample(Logits::F32(&logits)).unwrap() as usize] += 1.0;
        }
        for (token, (&count, &p)) in counts.iter().zip(&expected).enumerate() {
            let mean = p * f64::from(draws);
            let allowed = 5.0 * (mean * (1.0 - p)).sqrt() + 3.0;
            let near = (count - mean).abs() <= allowed;
            if (p == 0.0 && count > 0.0) || !near {
                failures.push(format!("{params:?}: token {token}: {count} draws, not {mean:.1}"));
            }
        }
    }
    assert!(failures.is_empty(), "{failures:#?}");
}

#[test]
fn penalties_change_the_greedy_choice() {
    let logits = [1.0, 3.0, 2.9, -1.0];
    let greedy = |params: SamplingParams, prompt: &[u32], answer: &[u32]| {
        let expected = reference(&params, &logits, prompt, answer);
        let mut sampler = Sampler::new(params, 4).unwrap();
        sampler.accept_prompt(prompt);
        answer.iter().for_each(|&t| sampler.accept(t));
        let token = sampler.sample(Logits::F32(&logits)).unwrap();
        let halves = logits.map(f16::from_f32);
        assert_eq!(sampler.sample(Logits::F16(&halves)).unwrap(), token);
        assert_eq!(expected[token as usize], 1.0);
        token
    };
    let repetition = SamplingParams { repetition_penalty: 1.2, ..SamplingParams::default() };
    assert_eq!(greedy(repetition.clone(), &[], &[]), 1);
    assert_eq!(greedy(repetition.clone(), &[1], &[]), 2, "of the prompt");
    let window = SamplingParams { penalty_window: 2, ..repetition };
    assert_eq!(greedy(window.clone(), &[1], &[3]), 2);
    assert_eq!(greedy(window, &[1], &[3, 3]), 1, "the window has passed it");
    let presence = SamplingParams { presence_penalty: 0.2, ..SamplingParams::default() };
    assert_eq!(greedy(presence.clone(), &[1], &[]), 1, "not of the prompt");
    assert_eq!(greedy(presence, &[], &[1]), 2);
    let frequency = SamplingParams { frequency_penalty: 0.04, ..SamplingParams::default() };
    assert_eq!(greedy(frequency.clone(), &[], &[1, 1]), 1);
    assert_eq!(greedy(frequency, &[], &[1, 1, 1]), 2, "grows with the count");
}

#[test]
fn a_seed_means_the_same_tokens_everywhere() {
    let logits = noise(&mut Rng::new(9), 1000);
    let draw = |params: SamplingParams| {
        let mut sampler = Sampler::new(params, 1000).unwrap();
        let tokens: Vec<_> =
            (0..6).map(|_| sampler.sample(Logits::F32(&logits)).unwrap()).collect();
        sampler.reset();
        assert_eq!(sampler.sample(Logits::F32(&logits)).unwrap(), tokens[0], "after a reset");
        tokens
    };
    let base = SamplingParams { temperature: 2.0, seed: Some(42), ..SamplingParams::default() };
    assert_eq!(draw(base.clone()), PLAIN);
    assert_eq!(draw(SamplingParams { top_p: 0.8, ..base.clone() }), TOP_P);
    assert_eq!(draw(SamplingParams { top_k: 50, min_p: 0.3, ..base.clone() }), TOP_K_MIN_P);
    assert_ne!(draw(SamplingParams { seed: Some(43), ..base.clone() }), PLAIN);
    let unseeded = SamplingParams { seed: None, ..base };
    let (a, b) = (Sampler::new(unseeded.clone(), 4).unwrap(), Sampler::new(unseeded, 4).unwrap());
    assert_ne!(a.seed(), b.seed(), "a drawn seed differs, and can be asked for");
}

const PLAIN: [u32; 6] = [786, 270, 977, 673, 769, 542];
const TOP_P: [u32; 6] = [786, 237, 974, 643, 744, 521];
const TOP_K_MIN_P: [u32; 6] = [796, 196, 993, 674, 786, 458];

#[test]
fn ties_at_the_edge_of_top_k_all_stay() {
    let logits = [2.0, 1.0, 1.0, 1.0, 0.0];
    let params =
        SamplingParams { temperature: 5.0, top_k: 2, seed: Some(1), ..SamplingParams::default() };
    let mut sampler = Sampler::new(params, 5).unwrap();
    let mut seen = [false; 5];
    for _ in 0..200 {
        seen[sampler.sample(Logits::F32(&logits)).unwrap() as usize] = true;
    }
    assert_eq!(seen, [true, true, true, true, false]);
}

#[test]
fn hostile_logits() {
    let params = SamplingParams { temperature: 1.0, top_k: 3, ..SamplingParams::default() };
    let mut sampler = Sampler::new(params, 130).unwrap();
    let mut logits = vec![0.0; 130];
    logits[129] = f32::NAN;
    let error = sampler.sample(Logits::F32(&logits)).unwrap_err();
    assert_eq!(error.message(), "the logit of token 129 is NaN");
    logits[129] = f32::INFINITY;
    assert_eq!(sampler.sample(Logits::F32(&logits)).unwrap(), 129);
    let masked = vec![f32::NEG_INFINITY; 130];
    assert!(sampler.sample(Logits::F32(&masked)).unwrap_err().message().contains("all 130"));
    let error = sampler.sample(Logits::F32(&masked[..7])).unwrap_err();
    assert_eq!(error.message(), "expected logits of 130 tokens, found 7");
}

#[test]
fn what_is_not_allowed_is_never_chosen_whatever_its_logit_is() {
    // The largest logits, NaN among them, belong to ids that may not be chosen.
    let allowed = AllowedTokens::select(260, |id| id != 7 && !(64..130).contains(&id));
    let mut logits = noise(&mut Rng::new(4), 300);
    for id in [7, 64, 100, 129, 260, 299] {
        logits[id] = [40.0, f32::INFINITY, f32::NAN][id % 3];
    }
    let halves: Vec<_> = logits.iter().map(|&v| f16::from_f32(v)).collect();
    let best = |id: &usize| (logits[*id], std::cmp::Reverse(*id));
    let expected = (0..260).filter(|&id| allowed.contains(id as u32));
    let expected = expected.max_by(|a, b| best(a).partial_cmp(&best(b)).unwrap()).unwrap();
    let greedy = SamplingParams::default();
    let penalties = SamplingParams { presence_penalty: 1.0, ..greedy.clone() };
    let plain = SamplingParams { temperature: 50.0, seed: Some(1), ..greedy.clone() };
    let top_k = SamplingParams { top_k: 280, ..plain.clone() };
    let top_p = SamplingParams { top_p: 0.9, min_p: 0.001, ..plain.clone() };
    let allowed = Arc::new(allowed);
    for params in [greedy, penalties, plain, top_k, top_p] {
        let choices_differ = params.temperature > 0.0;
        let mut sampler = Sampler::restricted(params, 300, Arc::clone(&allowed)).unwrap();
        sampler.accept_prompt(&[7, 100, 299]);
        let mut seen = std::collections::BTreeSet::new();
        for round in 0..400 {
            let logits = if round % 2 == 0 { Logits::F32(&logits) } else { Logits::F16(&halves) };
            seen.insert(sampler.sample(logits).unwrap());
        }
        assert!(seen.iter().all(|&id| allowed.contains(id)), "{seen:?}");
        if choices_differ {
            assert!(seen.len() > 50, "{seen:?}");
        } else {
            assert_eq!(seen.into_iter().collect::<Vec<_>>(), [expected as u32]);
        }
    }
    let error = Sampler::restricted(SamplingParams::default(), 259, allowed).unwrap_err();
    assert_eq!(error.message(), "token 259 may be chosen, but there are 259 logits");
}

#[test]
fn a_bias_is_added_to_logits_before_all_else() {
    let logits = [1.0, 3.0, 2.0, f32::NEG_INFINITY];
    let chosen = |params: SamplingParams| {
        Sampler::new(params, 4).unwrap().sample(Logits::F32(&logits)).unwrap()
    };
    let greedy = SamplingParams::default;
    assert_eq!(chosen(greedy()), 1);
    assert_eq!(chosen(greedy().logit_bias([(1, -100.0)])), 2);
    assert_eq!(
        chosen(greedy().logit_bias([(0, 2.5), (9, 100.0)])),
        0,
        "a token beyond has no logit"
    );
    assert_eq!(chosen(greedy().logit_bias([(3, 100.0)])), 1, "what cannot be chosen stays so");
    for seed in 0..20 {
        let drawn = greedy().temperature(1.0).seed(seed);
        assert_eq!(chosen(drawn.clone().logit_bias([(2, 100.0)])), 2);
        assert_ne!(chosen(drawn.top_k(2).logit_bias([(1, -100.0)])), 1);
    }
}
