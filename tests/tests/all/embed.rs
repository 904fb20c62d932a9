//! The tiny encoder from checkpoint to vectors, against goldens that `transformers` made.

use std::path::{Path, PathBuf};

use qhx_base::ErrorKind;
use qhx_base::compare::Distance;
use qhx_core::engine::Model;
use qhx_forge::{ForgeOptions, Precision, Task};
use qhx_tests::forged::Forged;
use qhx_tests::plugin_files::copy_folder;
use qhx_tests::restarting::Restarting;
use qhx_tests::{backends, files, has, replay, says, tiny};
use qhx_tiers::tier;
use serde_json::Value;

const TINY: &str = "embed-mistral-tiny";

struct Text {
    id: String,
    text: String,
    ids: Vec<u32>,
    expected: Vec<f32>,
}

struct Goldens {
    json: Value,
    tensors: PathBuf,
    texts: Vec<Text>,
}

impl Goldens {
    fn read(folder: &Path) -> Self {
        let json = files::json(&folder.join("goldens_embed.json"));
        let tensors = folder.join("goldens_embed.safetensors");
        let mut goldens = Self { json, tensors, texts: Vec::new() };
        let prefix = |role: &str| {
            let key = if role == "query" { "query_prefix" } else { "doc_prefix" };
            goldens.json[key].as_str().unwrap()
        };
        let text = |value: &Value| {
            let id = value["id"].as_str().unwrap().to_owned();
            let prefix = prefix(value["role"].as_str().unwrap());
            Text {
                text: format!("{prefix}{}", value["text"].as_str().unwrap()),
                ids: ids(&value["ids"]),
                expected: goldens.vector(&id),
                id,
            }
        };
        goldens.texts = goldens.json["texts"].as_array().unwrap().iter().map(text).collect();
        assert!(goldens.texts.len() >= 12);
        goldens
    }

    fn vector(&self, name: &str) -> Vec<f32> {
        files::tensor(&self.tensors, name).1
    }
}

/// The tiny model and its goldens.
fn tiny() -> (PathBuf, Goldens) {
    let checkpoint = tiny::fixture(TINY);
    let goldens = Goldens::read(&checkpoint);
    (checkpoint, goldens)
}

fn ids(value: &Value) -> Vec<u32> {
    value.as_array().unwrap().iter().map(|v| v.as_u64().unwrap() as u32).collect()
}

/// Tokens of the texts that the slow tests take.
const SHORT: usize = 32;

fn bundle(checkpoint: &Path, change: impl FnOnce(&mut ForgeOptions)) -> Forged {
    Forged::of(checkpoint, |options| {
        options.task = Some(Task::Embed);
        // One length, unless a test asks for more.
        options.prefill = Some(Vec::new());
        change(options);
    })
}

fn vectors(model: &mut Model, goldens: &Goldens) -> Vec<Vec<f32>> {
    goldens
        .texts
        .iter()
        .map(|text| {
            let tokens = model.tokenizer().unwrap().encode(&text.text, true).unwrap();
            assert_eq!(tokens, text.ids, "{}", text.id);
            let vector = model.embed(&tokens).unwrap_or_else(|e| panic!("{}: {e}", text.id));
            vector.to_vec()
        })
        .collect()
}

fn cosine(found: &[f32], expected: &[f32]) -> f64 {
    Distance::of(found, expected).unwrap().cosine
}

/// Every vector near the reference's, and documents in the reference's order.
fn compare(found: &[Vec<f32>], goldens: &Goldens, min: f64, label: &str) {
    let mut worst = 1.0f64;
    for (text, vector) in goldens.texts.iter().zip(found) {
        let cosine = cosine(vector, &text.expected);
        worst = worst.min(cosine);
        assert!(cosine >= min, "{label}, {}: cosine {cosine}", text.id);
        let norm = vector.iter().map(|v| f64::from(*v) * f64::from(*v)).sum::<f64>().sqrt();
        assert!((norm - 1.0).abs() < 1e-5, "{label}, {}: norm {norm}", text.id);
    }
    let vector = |id: &str| &found[goldens.texts.iter().position(|t| t.id == id).unwrap()];
    for ranking in goldens.json["ranking"].as_array().unwrap() {
        let present = |id: &Value| goldens.texts.iter().any(|t| id == t.id.as_str());
        if !present(&ranking["query"]) {
            continue;
        }
        let query = vector(ranking["query"].as_str().unwrap());
        let documents = ranking["documents"].as_array().unwrap().iter();
        let expected: Vec<_> = documents.filter(|id| present(id)).collect();
        let mut order = expected.clone();
        let score = |id: &Value| cosine(query, vector(id.as_str().unwrap()));
        order.sort_by(|a, b| score(b).total_cmp(&score(a)));
        assert_eq!(order, expected, "{label}, ranking of {}", ranking["query"]);
    }
    eprintln!("{label}: least cosine {worst:.8}");
}

#[test]
fn cpu_equals_the_reference_and_parts_change_no_bit() {
    let (checkpoint, goldens) = tiny();
    let mut whole: Option<Vec<Vec<f32>>> = None;
    for parts in [1, 2, 4] {
        let bundle = bundle(&checkpoint, |o| o.shards = parts);
        let mut model = bundle.on_cpu();
        assert_eq!(model.info().embedding_dim, 92);
        assert_eq!(model.info().max_ctx, 180, "max_seq_length of the checkpoint");
        let found = vectors(&mut model, &goldens);
        compare(&found, &goldens, 0.99999, &format!("cpu, {parts} parts"));
        let loads: Vec<_> = model.context_loads().iter().map(|c| c.key.as_str()).collect();
        let keys = (0..parts).map(|part| format!("enc_p{part}"));
        let keys: Vec<_> = if parts == 1 { vec!["enc".to_owned()] } else { keys.collect() };
        assert_eq!(loads, keys);
        assert!(model.context_loads().iter().all(|c| !c.time.is_zero()));
        let spans = model.span_stats();
        for part in 0..parts {
            let name = format!("part {part}");
            let span = spans.iter().find(|s| s.name == name).unwrap();
            assert_eq!(span.count, goldens.texts.len() as u64, "{name}");
        }
        match &whole {
            Some(whole) => assert_eq!(&found, whole, "{parts} parts"),
            None => whole = Some(found),
        }
    }
}

/// Texts of each length through the graphs made for it: the vectors are those of one graph for all.
#[test]
fn a_text_goes_through_the_shortest_graphs_that_hold_it() {
    let (checkpoint, goldens) = tiny();
    let whole = bundle(&checkpoint, |_| ());
    let alone = vectors(&mut whole.on_cpu(), &goldens);
    let lengths: Vec<_> = goldens.texts.iter().map(|text| text.ids.len()).collect();
    // By default, and over two parts where that is asked for.
    for (parts, asked) in [(1, None), (2, Some(vec![32, 128]))] {
        let bundle = bundle(&checkpoint, |o| (o.shards, o.prefill) = (parts, asked));
        let mut model = bundle.on_cpu();
        assert_eq!(model.info().max_ctx, 180);
        let found = vectors(&mut model, &goldens);
        compare(&found, &goldens, 0.99999, &format!("cpu, by length, {parts} parts"));
        for ((vector, alone), text) in found.iter().zip(&alone).zip(&goldens.texts) {
            let largest = Distance::of(vector, alone).unwrap().largest;
            assert!(largest <= 1e-5, "{}: {largest:e}", text.id);
        }
        let count = |name: &str| -> u64 {
            let part = format!("{name}_p");
            replay::executions(&model, |graph| graph == name || graph.starts_with(&part))
        };
        let within = |low: usize, high: usize| {
            let texts = lengths.iter().filter(|&&length| low < length && length <= high).count();
            (parts * texts) as u64
        };
        let expected = [within(0, 32), within(32, 128), within(128, 180)];
        assert!(expected[0] > 0 && expected[1] > 0, "{lengths:?}");
        assert_eq!(["enc32", "enc128", "enc"].map(count), expected);
    }
}

/// Texts that share graphs have the vectors that they have alone, whatever is pooled and whoever sees whom.
#[test]
fn texts_that_share_a_graph_are_as_if_each_were_alone() {
    let (checkpoint, goldens) = tiny();
    let texts: Vec<&[u32]> = goldens.texts.iter().map(|text| text.ids.as_slice()).collect();
    let bundle = bundle(&checkpoint, |o| o.prefill = None);
    for (pooling, causal) in [("mean", false), ("last", true), ("cls", false), ("mean", true)] {
        bundle.edit(|manifest| {
            let params = &mut manifest["plan"]["params"];
            assert!(params["pooling"].is_string() && params["causal"].is_boolean(), "{params}");
            (params["pooling"], params["causal"]) = (pooling.into(), causal.into());
        });
        let mut model = bundle.on_cpu();
        assert_eq!(model.batch_tokens(), 4 * 180);
        let executions = |model: &Model| replay::executions(model, |_| true);
        let alone: Vec<Vec<f32>> =
            texts.iter().map(|text| model.embed(text).unwrap().to_vec()).collect();
        let before = executions(&model);
        assert_eq!(before, texts.len() as u64);
        let together = model.embed_many(&texts).unwrap();
        assert!(executions(&model) - before <= before / 2, "{} for {before}", executions(&model));
        if (pooling, causal) == ("mean", false) {
            compare(&together, &goldens, 0.99999, "cpu, texts together");
        }
        assert_eq!(together.len(), alone.len());
        for ((together, alone), text) in together.iter().zip(&alone).zip(&goldens.texts) {
            let cosine = cosine(together, alone);
            assert!(cosine >= 0.999_999, "{}, {pooling}, causal {causal}: {cosine}", text.id);
        }
    }
}

#[test]
fn many_texts_come_back_in_order_and_one_that_fails_is_named() {
    let (checkpoint, goldens) = tiny();
    let bundle = bundle(&checkpoint, |o| o.prefill = None);
    let mut model = bundle.on_cpu();
    let usual =
        |index: usize| (0..1 + index % 5).map(|i| (3 + i * 7 + index % 11) as u32).collect();
    let mut texts: Vec<Vec<u32>> = (0..10_000).map(usual).collect();
    let vectors = model.embed_many(&texts).unwrap();
    assert_eq!(vectors.len(), texts.len());
    for index in [0, 1, 54, 4_321, 9_999] {
        let cosine = cosine(&vectors[index], model.embed(&texts[index]).unwrap());
        assert!(cosine >= 0.999_999, "text {index}: {cosine}");
    }
    assert!(model.embed_many::<Vec<u32>>(&[]).unwrap().is_empty());

    texts.truncate(90);
    let over = [ids(&goldens.json["over"]["ids"]), vec![7]].concat();
    for (bad, words) in
        [(Vec::new(), "no tokens"), (over, "181 tokens"), (vec![3, 100_000], "100000")]
    {
        let alone = model.embed(&bad).unwrap_err();
        assert!(alone.message().contains(words), "{alone}");
        // The later one is not heard of.
        (texts[37], texts[80]) = (bad, vec![200_000]);
        let error = model.embed_many(&texts).unwrap_err();
        assert_eq!(
            (error.kind(), error.message()),
            (alone.kind(), format!("text 37: {}", alone.message()).as_str())
        );
        let mut seen = Vec::new();
        let keep = |index, _: &[f32]| {
            seen.push(index);
            Ok(())
        };
        model.embed_each(&texts, keep).unwrap_err();
        assert_eq!(seen, (0..37).collect::<Vec<_>>(), "those before it");
    }
    let mut count = 0;
    let full = |_, _: &[f32]| {
        count += 1;
        Err(qhx_base::Error::new(ErrorKind::Io, "no room"))
    };
    assert_eq!(model.embed_each(&texts[..9], full).unwrap_err().message(), "no room");
    assert_eq!(count, 1);
}

#[test]
fn graphs_that_take_no_shorter_texts_are_an_error() {
    let bundle = bundle(&tiny::fixture(TINY), |o| o.prefill = Some(vec![16]));
    bundle.edit(|manifest| manifest["plan"]["params"]["buckets"] = "enc".into());
    let error = bundle.refusal();
    let words = ["/plan/params/buckets", "\"enc\" takes 180 rows", "fewer than the 180"];
    assert!(words.iter().all(|word| error.message().contains(word)), "{error}");
}

#[test]
fn a_text_leaves_no_trace_in_the_next_one() {
    let (checkpoint, goldens) = tiny();
    let bundle = bundle(&checkpoint, |o| o.shards = 2);
    let mut model = bundle.on_cpu();
    let (short, long) = (&goldens.texts[0].ids, &goldens.json["over"]["ids"]);
    let alone = model.embed(short).unwrap().to_vec();
    model.embed(&ids(long)).unwrap();
    assert_eq!(model.embed(short).unwrap(), alone);
}

/// The restart also overwrites what the op wrote once when it was opened.
#[test]
fn a_restart_that_overwrites_all_buffers_changes_no_vector() {
    let (checkpoint, goldens) = tiny();
    let bundle = bundle(&checkpoint, |o| o.shards = 2);
    let backend = Restarting::new(backends::cpu());
    let mut model = tiny::open(&bundle.manifest, backend.clone()).unwrap();
    let executions = |model: &Model| replay::executions(model, |_| true);
    let texts: Vec<&[u32]> = goldens.texts.iter().take(4).map(|text| text.ids.as_slice()).collect();
    let expected = model.embed_many(&texts).unwrap();
    for nth in [1, 2] {
        let before = executions(&model);
        backend.restart_at(nth);
        assert_eq!(model.embed_many(&texts).unwrap(), expected, "at execution {nth}");
        assert_eq!(backend.opened(), 2 * (nth + 1), "both parts, once");
        assert!(executions(&model) > before, "the count goes on");
    }
}

#[test]
fn pooling_and_normalisation_follow_the_manifest() {
    let (checkpoint, goldens) = tiny();
    let bundle = bundle(&checkpoint, |_| ());
    let set = |key: &str, value: Value| {
        bundle.edit(|manifest| {
            let param = &mut manifest["plan"]["params"][key];
            assert!(!param.is_null() && *param != value, "{key}: {param}");
            *param = value;
        });
    };
    let mut compared = 0;
    for pooling in ["last", "cls"] {
        set("pooling", pooling.into());
        let mut model = bundle.on_cpu();
        for entry in goldens.json["texts"].as_array().unwrap() {
            if !entry["poolings"].as_array().unwrap().contains(&Value::from(pooling)) {
                continue;
            }
            let id = entry["id"].as_str().unwrap();
            let expected = goldens.vector(&format!("{id}.{pooling}"));
            let cosine = cosine(model.embed(&ids(&entry["ids"])).unwrap(), &expected);
            assert!(cosine >= 0.99999, "{id}, {pooling}: cosine {cosine}");
            compared += 1;
        }
    }
    assert!(compared >= 6);
    set("pooling", "mean".into());
    set("normalize", false.into());
    let mut model = bundle.on_cpu();
    let vector = model.embed(&goldens.texts[0].ids).unwrap();
    let norm = vector.iter().map(|v| v * v).sum::<f32>().sqrt();
    assert!((norm - 1.0).abs() > 0.05, "norm {norm}");
    assert!(cosine(vector, &goldens.texts[0].expected) >= 0.99999);
}

#[test]
fn a_part_that_the_plan_does_not_name_is_an_error() {
    let bundle = bundle(&tiny::fixture(TINY), |o| o.shards = 4);
    let whole = bundle.json()["plan"]["params"]["parts"].clone();
    for missing in 0..4 {
        let mut parts = whole.as_array().unwrap().clone();
        let part = parts.remove(missing);
        bundle.edit(|manifest| manifest["plan"]["params"]["parts"] = parts.into());
        let error = bundle.refusal();
        assert_eq!(error.kind(), ErrorKind::Manifest);
        let words = ["/plan/params/parts", part.as_str().unwrap(), "not among them"];
        assert!(words.iter().all(|word| error.message().contains(word)), "{error}");
    }
}

#[test]
fn a_text_beyond_the_graphs_is_refused() {
    let (checkpoint, goldens) = tiny();
    let bundle = bundle(&checkpoint, |_| ());
    let mut model = bundle.on_cpu();
    let over = ids(&goldens.json["over"]["ids"]);
    assert_eq!(over.len(), 180);
    let mut longer = over.clone();
    longer.push(7);
    says(&model.embed(&longer).unwrap_err(), ErrorKind::Prompt, &["181", "180"]);
    let cosine = cosine(model.embed(&over).unwrap(), &goldens.vector("over"));
    assert!(cosine >= 0.99999, "cosine {cosine}");
    let error = model.embed(&[]).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Prompt);
    has(model.embed(&[100_000]).unwrap_err().message(), &["100000"]);
}

#[test]
fn an_encoder_is_not_forged_for_generation() {
    let generating = |o: &mut ForgeOptions| o.task = Some(Task::Generate);
    let error = Forged::try_of(&tiny::fixture(TINY), generating).unwrap_err();
    says(&error, ErrorKind::Usage, &["--task embed"]);
}

fn htp(checkpoint: &Path, target: &str, int8: bool, parts: usize) -> (Forged, Model) {
    let bundle = bundle(checkpoint, |o| {
        o.shards = parts;
        o.precision = if int8 { Precision::W8A16 } else { Precision::Fp16 };
        // The emulator takes some thirty times as long for int8.
        o.max_ctx = (int8 || only_short(target)).then_some(SHORT);
        o.compiler = Some(backends::compiler(target));
    });
    let model = bundle.open(backends::qnn());
    (bundle, model)
}

/// Texts that the usual run takes to the emulator: a question with some of its documents, the shortest and the longest
/// text.
const SOME: [&str; 5] = ["q0", "bytes", "d3", "short", "long"];

impl Goldens {
    fn brief(mut self) -> Self {
        self.texts.retain(|text| tiny::full_matrix() || SOME.contains(&&*text.id));
        self
    }
}

/// True if the usual run takes only short texts to a target.
fn only_short(target: &str) -> bool {
    target != "v81" && !tiny::full_matrix()
}

#[tier(qnn)]
fn htp_fp16_is_near_the_reference() {
    let checkpoint = tiny::fixture(TINY);
    let mut goldens = Goldens::read(&checkpoint).brief();
    // Not v68, beside which the emulator executes nothing for other chips: see `tests/tests/targets.rs`.
    let older = [("v79", 2), ("v73", 1), ("v69", 1)];
    let older = older.into_iter().filter(|_| tiny::full_matrix());
    for (target, parts) in [("v81", 4), ("v75", 1)].into_iter().chain(older) {
        let (_bundle, mut model) = htp(&checkpoint, target, false, parts);
        if only_short(target) {
            goldens.texts.retain(|text| text.ids.len() <= SHORT);
        }
        let found = vectors(&mut model, &goldens);
        compare(&found, &goldens, 0.9995, &format!("htp {target} fp16, {parts} parts"));
    }
}

#[tier(qnn)]
fn htp_w8a16_is_near_the_reference() {
    let checkpoint = tiny::fixture(TINY);
    let mut goldens = Goldens::read(&checkpoint).brief();
    goldens.texts.retain(|text| text.ids.len() <= SHORT);
    assert!(goldens.texts.len() >= 4, "{} short texts", goldens.texts.len());
    let (_bundle, mut model) = htp(&checkpoint, "v81", true, 2);
    let found = vectors(&mut model, &goldens);
    compare(&found, &goldens, 0.999, "htp v81 w8a16, 2 parts");
}

#[tier(qnn)]
fn htp_takes_each_text_through_the_shortest_graphs() {
    let (checkpoint, mut goldens) = tiny();
    goldens.texts.retain(|text| text.ids.len() <= SHORT);
    let half = |text: &&Text| text.ids.len() <= SHORT / 2;
    let short = goldens.texts.iter().filter(half).count() as u64;
    let bundle = bundle(&checkpoint, |o| {
        (o.prefill, o.max_ctx) = (Some(vec![SHORT / 2]), Some(SHORT));
        o.compiler = Some(backends::compiler("v81"));
    });
    let mut model = bundle.open(backends::qnn());
    compare(&vectors(&mut model, &goldens), &goldens, 0.9995, "htp v81 fp16, by length");
    let runs: Vec<_> =
        model.graph_stats().iter().map(|s| (s.graph.clone(), s.executions)).collect();
    let long = goldens.texts.len() as u64 - short;
    assert!(short > 0 && long > 0);
    assert!(runs.contains(&("enc16".to_owned(), short)), "{runs:?}");
    assert!(runs.contains(&("enc".to_owned(), long)), "{runs:?}");
    let texts: Vec<&[u32]> = goldens.texts.iter().map(|text| text.ids.as_slice()).collect();
    let together = model.embed_many(&texts).unwrap();
    compare(&together, &goldens, 0.9995, "htp v81 fp16, texts together");
    let executions = replay::executions(&model, |_| true);
    assert!(executions < 2 * texts.len() as u64, "{executions} for {} texts, twice", texts.len());
}

/// A call that fails is one error, a restart of the DSP none; the vectors afterwards are the same, bit by bit.
#[cfg(target_os = "linux")]
#[tier(qnn)]
fn htp_faults_and_a_restart_change_no_vector() {
    use qhx_fake_device::{Plan, Then};
    let faults = qhx_tests::faults::Faults::open();
    let checkpoint = tiny::fixture(TINY);
    let text = Goldens::read(&checkpoint).texts.swap_remove(0).ids;
    let (bundle, model) = htp(&checkpoint, "v81", false, 2);
    drop(model);
    let embed = |model: &mut Model| model.embed(&text).map(<[f32]>::to_vec);
    // Of calls that fail, those of a text are done as those of a prompt are, in `bad_bundles`.
    if tiny::full_matrix() {
        faults.walk("embed", None, &bundle.manifest, embed);
    }
    let mut model = faults.model(&bundle.manifest).unwrap();
    faults.plan(&Plan::default());
    let expected = embed(&mut model).unwrap();
    for nth in [1, 2] {
        faults.plan(&Plan::at("graphExecute", nth, Then::Restart(1007)));
        assert_eq!(embed(&mut model).unwrap(), expected);
        assert_eq!(faults.report().calls["contextCreateFromBinary"], 2, "both parts, once");
    }
    drop(model);
    faults.closed("restarts");
}

/// Any other encoder with goldens, such as one that `tests/oracle/train.py` made.
#[tier(by_hand = "QHX_TEST_EMBED")]
fn checkpoint_of_the_environment_is_near_the_reference() {
    let checkpoint = PathBuf::from(std::env::var_os("QHX_TEST_EMBED").unwrap());
    let goldens = Goldens::read(&checkpoint);
    for parts in [1, 2] {
        let bundle = bundle(&checkpoint, |o| o.shards = parts);
        let mut model = bundle.on_cpu();
        compare(&vectors(&mut model, &goldens), &goldens, 0.99999, "cpu");
    }
}

#[tier(qnn, by_hand = "QHX_TEST_EMBED")]
fn htp_is_near_with_a_checkpoint_of_the_environment() {
    let checkpoint = PathBuf::from(std::env::var_os("QHX_TEST_EMBED").unwrap());
    let goldens = Goldens::read(&checkpoint);
    let (_bundle, mut model) = htp(&checkpoint, "v81", false, 2);
    compare(&vectors(&mut model, &goldens), &goldens, 0.9995, "htp v81 fp16");
}

/// Three ways to pool whose vectors stand one after the other, dense layers, LayerNorm and Normalize, against what the
/// modules of `sentence-transformers` make of the same rows.
#[test]
fn modules_of_sentence_transformers_are_applied() {
    let checkpoint = tempfile::tempdir().unwrap();
    copy_folder(&tiny::fixture(TINY), checkpoint.path());
    copy_folder(&tiny::fixture("embed-modules"), checkpoint.path());
    let bundle = bundle(checkpoint.path(), |_| ());
    let mut model = bundle.on_cpu();
    let vectors: Vec<Value> = files::json(&tiny::fixture("embed-modules/vectors.json"));
    assert_eq!(vectors.len(), 5);
    for golden in vectors {
        let found = model.embed(&ids(&golden["ids"])).unwrap().to_vec();
        let expected: Vec<f32> = serde_json::from_value(golden["vector"].clone()).unwrap();
        assert_eq!(found.len(), expected.len());
        for (found, expected) in found.iter().zip(&expected) {
            assert!((found - expected).abs() < 1e-5, "{found}, expected {expected}");
        }
    }
}
