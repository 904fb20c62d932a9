//! Qwen3-VL and Qwen2.5-VL from pixels to text against `transformers`: patches, features, positions, logits, tokens;
//! images stretched and in their own shape, several in a prompt, a video, chats that keep an image, texts alone.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};

use qhx_base::ErrorKind;
use qhx_base::compare::Distance;
use qhx_core::engine::{Model, Part, Prompt, Request};
use qhx_core::op::Segment;
use qhx_exec::backend::Backend;
use qhx_forge::{ForgeOptions, Precision, Silent, forge};
use qhx_kit::vision::{Grid, resample_positions};
use qhx_tests::forged::set;
use qhx_tests::images::{Sights, answer};
use qhx_tests::replay::{generate, try_generate, within};
use qhx_tests::tiny::{self, Bundles, fixture, full_matrix};
use qhx_tests::{backends, files, has, says};
use qhx_tiers::tier;
use qhx_types::Media;
use serde_json::{Value, json};

const TINY: &str = "qwen3vl-tiny";
/// Qwen2.5-VL.
const WINDOWED: &str = "qwen25vl-unseen";
/// Qwen2-VL.
const OLDER: &str = "vision/qwen2vl";
/// Vision graphs for the three areas that images of the tiny model have.
const SHAPES: &str = "24,32,48";
/// Logits and features on the CPU differ by rounding only.
const CPU_DISTANCE: f64 = 1e-3;

fn sights() -> &'static Sights {
    static SIGHTS: OnceLock<Sights> = OnceLock::new();
    SIGHTS.get_or_init(|| Sights::of(&fixture(TINY)))
}

/// Options of a bundle of the tiny model.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct Form {
    target: Option<&'static str>,
    /// Images keep their shape.
    native: bool,
    shards: usize,
    /// Rows of the prompt graph; 0 for none.
    prompt: usize,
    int8: bool,
}

const FIXED: Form = Form { target: None, native: false, shards: 1, prompt: 16, int8: false };
/// Images in their shape, prompts in chunks of a size that cuts through rows of images.
const NATIVE: Form = Form { native: true, shards: 2, prompt: 7, ..FIXED };

impl Form {
    fn mode(self) -> &'static str {
        if self.native { "native" } else { "fixed" }
    }

    /// Makes it once a process.
    fn bundle(self) -> PathBuf {
        static MADE: Bundles<Form> = Bundles::new();
        MADE.get(self, |out| self.forge(out))
    }

    fn forge(self, out: &Path) -> PathBuf {
        let mut options = ForgeOptions::new(out);
        options.max_ctx = Some(200);
        options.shards = self.shards;
        options.prefill = Some([self.prompt].into_iter().filter(|rows| *rows > 0).collect());
        let (key, value) =
            if self.native { ("image-patches", SHAPES) } else { ("image-size", "48") };
        set(&mut options, &[(key, value)]);
        if self.int8 {
            options.precision = Precision::W8A16;
            options.head = Some(Precision::W8A16);
            set(&mut options, &[("vision", "w8a16")]);
        }
        options.compiler = self.target.map(backends::compiler);
        forge(&fixture(TINY), &options, &mut Silent)
            .unwrap_or_else(|e| panic!("{self:?}: {e}"))
            .manifest
    }

    fn open(self) -> Model {
        tiny::open(&self.bundle(), backends::cpu()).unwrap()
    }
}

fn dumping(manifest: &Path, backend: Arc<dyn Backend>, folder: &Path) -> Model {
    tiny::open_dumping(manifest, backend, &tiny::plugins(), folder)
}

fn near(form: Form, label: &str) {
    let mut model = form.open();
    let cases = sights().of_mode(form.mode());
    assert!(cases.len() > 10);
    sights().greedy_exact(&mut model, &cases, label);
    if form == NATIVE {
        // Behind an image a draft token stands where the token would that is decoded.
        let found = sights().speculative_exact(&mut model, &cases, "3".parse().unwrap(), label);
        eprintln!("{label}: {found:?}");
        assert!(found.drafted > found.accepted && found.accepted > 0, "{found:?}");
    }
    within(sights().step_exact(&mut model, &cases, label), CPU_DISTANCE, label);
}

#[test]
fn stretched_images_give_the_reference_s_tokens_and_logits() {
    near(FIXED, "stretched, prompts in chunks of 16");
}

#[test]
fn images_in_their_shape_and_a_video_equal_the_reference() {
    near(NATIVE, "own shape, two shards, prompts in chunks of 7");
}

#[test]
fn bundles_without_prompt_graphs_see_token_by_token() {
    near(Form { prompt: 0, shards: 1, ..NATIVE }, "own shape, prompts token by token");
}

/// Shows every image of a mode, and the video: see [`Sights::features`].
fn features(form: Form, backend: Arc<dyn Backend>, ids: Option<&[&str]>) -> (f64, f64) {
    let folder = tempfile::tempdir().unwrap();
    let mut model = dumping(&form.bundle(), backend, folder.path());
    let film = form.native && ids.is_none();
    sights().features(model.op_mut(), folder.path(), form.mode(), ids, film, 3)
}

#[test]
fn pixels_and_features_equal_the_reference_s() {
    for form in [FIXED, NATIVE] {
        let (cosine, largest) = features(form, backends::cpu(), None);
        eprintln!("{}: features differ by at most {largest:.2e}, cosine {cosine:.8}", form.mode());
        assert!(cosine >= 0.999_99 && largest <= CPU_DISTANCE, "{form:?}: {cosine} {largest}");
    }
}

#[test]
fn positions_equal_those_of_the_reference() {
    let folder = tempfile::tempdir().unwrap();
    let mut model = dumping(&NATIVE.bundle(), backends::cpu(), folder.path());
    sights().same_positions(model.op_mut(), folder.path(), "native");
}

#[test]
fn a_chat_keeps_its_image_and_takes_in_only_what_is_new() {
    for form in [FIXED, NATIVE] {
        let mut model = form.open();
        let chat = sights().chat.iter().find(|chat| chat.mode == form.mode()).unwrap();
        let mut seen = 0;
        for (index, turn) in chat.turns.iter().enumerate() {
            let prompt = sights().conversation(&turn.messages);
            let generation = answer(&mut model, prompt, &turn.golden);
            assert_eq!(generation.tokens, turn.golden.output_ids, "{}, turn {index}", chat.id);
            assert_eq!(generation.text, turn.golden.text, "{}, turn {index}", chat.id);
            assert_eq!(generation.reused_tokens, seen, "{}, turn {index}", chat.id);
            // The ending token is chosen, and not consumed.
            seen = turn.golden.prompt_ids.len() + turn.golden.output_ids.len() - 1;
        }
        let count = |model: &Model| {
            let spans = model.span_stats();
            spans.into_iter().find(|span| span.name == "vision").map_or(0, |span| span.count)
        };
        assert_eq!(count(&model), 1, "the image is seen once");
    }
}

#[test]
fn an_image_is_seen_on_one_backend_and_told_on_another() {
    let mut model = NATIVE.open();
    model.decode_on(Some(backends::cpu()), "asked for").unwrap();
    let chat = sights().chat.iter().find(|chat| chat.mode == NATIVE.mode()).unwrap();
    for (index, turn) in chat.turns.iter().enumerate() {
        let prompt = sights().conversation(&turn.messages);
        let generation = answer(&mut model, prompt, &turn.golden);
        assert_eq!(generation.tokens, turn.golden.output_ids, "{}, turn {index}", chat.id);
        assert!(index > 0 || generation.timings.hand_overs.count == 1, "{}", chat.id);
    }
}

#[test]
fn a_state_with_an_image_goes_on_in_another_session() {
    let mut model = NATIVE.open();
    let chat = sights().chat.iter().find(|chat| chat.mode == NATIVE.mode()).unwrap();
    let mut seen = 0;
    for (index, turn) in chat.turns.iter().enumerate() {
        let prompt = sights().conversation(&turn.messages);
        let generation = answer(&mut model, prompt, &turn.golden);
        assert_eq!(generation.tokens, turn.golden.output_ids, "{}, turn {index}", chat.id);
        assert_eq!(generation.reused_tokens, seen, "{}, turn {index}", chat.id);
        seen = turn.golden.prompt_ids.len() + turn.golden.output_ids.len() - 1;
        let state = model.export_state().unwrap();
        model = model.new_session().unwrap();
        model.import_state(&state).unwrap();
    }
}

#[test]
fn another_image_of_the_same_size_is_looked_at() {
    let mut model = FIXED.open();
    let (cross, rings) = (sights().case("fixed-cross"), sights().case("fixed-rings"));
    for case in [cross, rings, cross] {
        let generation = answer(&mut model, sights().prompt(case), &case.golden);
        assert_eq!(generation.tokens, case.golden.output_ids, "{}", case.id);
        let image = case.golden.prompt_ids.iter().position(|id| sights().is_pad(*id)).unwrap();
        assert!(generation.reused_tokens <= image, "{}: {}", case.id, generation.reused_tokens);
    }
    let again = answer(&mut model, sights().prompt(cross), &cross.golden);
    assert_eq!(again.reused_tokens, cross.golden.prompt_ids.len() - 1);
}

/// Positions are a part of the state: what is cut off or restored goes on where the images left it.
#[test]
fn a_state_that_is_cut_back_or_restored_goes_on_as_before() {
    let mut model = NATIVE.open();
    let case = sights().case("two-native-train-fish");
    let ids = &case.golden.prompt_ids;
    let media = sights().media(case);
    let parts = sights().segments(ids, &media);
    let first = parts.iter().position(|part| !matches!(part, Segment::Tokens(_))).unwrap() + 1;
    let after: usize = parts.len() - first;
    assert_eq!(after, 3, "text, the second image, text");
    let op = model.op_mut();
    op.prefill(&parts[..first]).unwrap();
    let between = op.position();
    let snapshot = op.snapshot().unwrap();
    op.prefill(&parts[first..]).unwrap();
    let expected = &sights().logits(&case.id)[0];
    let near = |op: &dyn qhx_core::op::HostOp, label: &str| {
        let found = Distance::of(&op.logits().unwrap().to_f32(), expected).unwrap();
        assert!(found.largest <= CPU_DISTANCE, "{label}: {found:?}");
    };
    near(op, "in two pieces");
    op.decode(7).unwrap();
    op.truncate(between).unwrap();
    op.prefill(&parts[first..]).unwrap();
    near(op, "after truncation between the images");
    op.restore(snapshot).unwrap();
    assert_eq!(op.position(), between);
    op.prefill(&parts[first..]).unwrap();
    near(op, "from a snapshot");
    op.truncate(ids.len() - 5).unwrap();
    op.prefill(&[Segment::Tokens(&ids[ids.len() - 5..])]).unwrap();
    near(op, "the last text again");
    op.drop_snapshot(snapshot);
}

/// The processor's budget is one of all frames: the more there are, the fewer pixels has each.
#[test]
fn frames_of_a_long_video_are_small() {
    let manifest = changed(&NATIVE.bundle(), "video-budget", |manifest| {
        let vision = &mut manifest["params"]["vision"];
        (vision["video_min_pixels"], vision["video_max_pixels"]) = (json!(2048), json!(8192));
    });
    let mut model = tiny::open(&manifest, backends::cpu()).unwrap();
    // Sizes of the reference (`tests/fixtures/shape/vision.json`): 48 × 32 pixels, and 32 × 16.
    for (frames, tokens) in [(3u8, 6), (12, 2)] {
        let rgb = (0..frames).flat_map(|frame| vec![20 * frame; 52 * 34 * 3]).collect();
        let times = (0..frames).map(|frame| f32::from(frame) / 2.0).collect();
        let film = Media::video(rgb, 52, 34, times).unwrap();
        let prompt = Prompt::Parts(vec![Part::Media(film), Part::Text("Seen:".to_owned())]);
        let ids = model.encode_prompt(&prompt).unwrap();
        let shown = ids.iter().filter(|id| sights().is_pad(**id)).count();
        assert_eq!(shown, usize::from(frames).div_ceil(2) * tokens, "{frames} frames");
        // The op, which gets two frames at a time, has reckoned with all of them.
        generate(&mut model, &Request::greedy(prompt, 2));
    }
}

/// A copy of a bundle's manifest beside it, changed.
fn changed(manifest: &Path, name: &str, change: impl FnOnce(&mut Value)) -> PathBuf {
    let path = manifest.with_file_name(format!("{name}.json"));
    fs::copy(manifest, &path).unwrap();
    files::edit(&path, change);
    path
}

fn without_vision(manifest: &mut Value) {
    manifest["plan"]["params"].as_object_mut().unwrap().remove("vision").unwrap();
    manifest["plan"]["params"].as_object_mut().unwrap().remove("prefill").unwrap();
}

/// The text manifest of published bundles: the same files without vision and prompt graphs.
#[test]
fn text_goes_through_the_decode_graph_alone() {
    let manifest = changed(&FIXED.bundle(), "text-only", without_vision);
    let mut model = tiny::open(&manifest, backends::cpu()).unwrap();
    let texts: Vec<_> =
        sights().cases.iter().filter(|case| sights().media(case).is_empty()).collect();
    assert_eq!(texts.len(), 4);
    sights().greedy_exact(&mut model, &texts, "text only");
    let prompt = sights().prompt(sights().case("fixed-boat"));
    let error = model.encode_prompt(&prompt).unwrap_err();
    assert!(error.message().contains("takes text only"), "{error}");
    assert!(error.message().contains("plan.params.vision"), "{error}");
}

/// A manifest as published ones may be: other keys of the tables, which are paths alone.
#[test]
fn tables_under_other_keys_are_found() {
    let manifest = changed(&FIXED.bundle(), "other-keys", |manifest| {
        let tables = manifest["artifacts"]["vision"].take();
        for name in ["patch_embed", "patch_embed_bias", "pos_embed"] {
            manifest["artifacts"][format!("vis_{name}_f32")] = tables[name]["path"].clone();
        }
    });
    let mut model = tiny::open(&manifest, backends::cpu()).unwrap();
    sights().greedy_exact(&mut model, &[sights().case("fixed-boat")], "tables under other keys");
}

/// Tables that were made for images alone: filters summed over the frames of a patch, and the positions of the one
/// grid that the graph takes.
#[test]
fn tables_that_are_made_for_one_image_give_the_same_features() {
    let manifest = changed(&FIXED.bundle(), "one-image", |manifest| {
        let file = |name: &str| {
            let path = &manifest["artifacts"]["vision"][name]["path"];
            FIXED.bundle().with_file_name(path.as_str().unwrap())
        };
        let read = |name: &str| files::floats(&fs::read(file(name)).unwrap());
        let summed: Vec<f32> = read("patch_embed")
            .chunks_exact(2 * 64)
            .flat_map(|frames| (0..64).map(|pixel| frames[pixel] + frames[64 + pixel]))
            .collect();
        let mut resampled = vec![0.0; 36 * 60];
        let grid = Grid { rows: 6, columns: 6 };
        resample_positions(&read("pos_embed"), 7, 60, grid, 2, &mut resampled).unwrap();
        for (name, values) in [("patch_embed", summed), ("pos_embed", resampled)] {
            let path = format!("one-image-{name}.bin");
            let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
            fs::write(FIXED.bundle().with_file_name(&path), bytes).unwrap();
            manifest["artifacts"]["vision"][name] = json!({"path": path, "dtype": "f32"});
        }
        manifest["params"]["vision"].as_object_mut().unwrap().remove("pos_side").unwrap();
    });
    let folder = tempfile::tempdir().unwrap();
    let mut model = dumping(&manifest, backends::cpu(), folder.path());
    let (cosine, largest) =
        sights().features(model.op_mut(), folder.path(), "fixed", None, false, 3);
    assert!(cosine >= 0.999_99 && largest <= CPU_DISTANCE, "{cosine} {largest}");
    let film = sights().film();
    let error = model.op_mut().prefill(&[film.frames(0, 2).unwrap()]).unwrap_err();
    assert!(error.message().contains("takes no videos"), "{error}");
}

#[test]
fn bundles_that_do_not_fit_together_are_refused() {
    let fails = |name: &str, change: &dyn Fn(&mut Value), words: &[&str]| {
        let manifest = changed(&FIXED.bundle(), name, change);
        let error = tiny::open(&manifest, backends::cpu()).unwrap_err();
        let said = error.report().to_string();
        has(&said, words);
    };
    let table = |name: &'static str, value: Value| {
        move |manifest: &mut Value| manifest["artifacts"]["vision"][name] = value.clone()
    };
    fails("no-table", &table("pos_embed", Value::Null), &["pos_embed", "vis_pos_embed_f32"]);
    let bias = fs::read_dir(FIXED.bundle().parent().unwrap()).unwrap();
    let mut names = bias.map(|entry| entry.unwrap().file_name().into_string().unwrap());
    let bias = names.find(|name| name.ends_with("patch_embed_bias_f32.bin")).unwrap();
    let wrong = json!({"path": bias, "dtype": "f32"});
    fails(
        "bad-table",
        &table("patch_embed", wrong.clone()),
        &["60 values", "60 rows", "3 x 2 x 8 x 8"],
    );
    fails("bad-positions", &table("pos_embed", wrong), &["60 values", "7 x 7 rows"]);
    let param = |key: &'static str, value: Value| {
        move |manifest: &mut Value| manifest["params"][key] = value.clone()
    };
    fails("no-section", &param("rope_scaling", Value::Null), &["mrope_section is missing"]);
    fails("bad-token", &param("video_token_id", json!(436)), &["436", "outside the vocabulary"]);
    fails(
        "no-embeds",
        &|manifest| manifest["plan"]["params"]["tensors"] = json!({"elsewhere": "embeds"}),
        &["elsewhere"],
    );
}

#[test]
fn prompts_that_cannot_be_are_refused_and_leave_no_trace() {
    let mut model = NATIVE.open();
    let ask = |model: &mut Model, parts: Vec<Part>| {
        let request = Request::greedy(Prompt::Parts(parts), 4);
        try_generate(model, &request)
    };
    let image = |width: u32, height: u32| {
        Part::Media(Media::image(vec![90; (width * height * 3) as usize], width, height).unwrap())
    };
    let text = |text: &str| Part::Text(text.to_owned());
    let long: Vec<_> = (0..20).flat_map(|_| [image(48, 48), text("and")]).collect();
    for (parts, words) in [
        (vec![image(402, 2)], "factor of 200"),
        (vec![image(1600, 9)], "at most 48"),
        (long, "inside image 16 of the prompt"),
    ] {
        says(&ask(&mut model, parts).unwrap_err(), ErrorKind::Prompt, &[words]);
    }
    // The smallest image, and a conversation after all of this.
    assert!(ask(&mut model, vec![image(1, 1), text("Seen:")]).is_ok());
    sights().greedy_exact(&mut model, &[sights().case("native-sun")], "after errors");
}

#[test]
fn int8_weights_keep_the_answers() {
    let form = Form { int8: true, ..NATIVE };
    let mut model = form.open();
    for case in sights().of_mode("native") {
        model.reset().unwrap();
        let generation = answer(&mut model, sights().prompt(case), &case.golden);
        assert_eq!(generation.tokens, case.golden.output_ids, "{}", case.id);
    }
    let (cosine, largest) = features(form, backends::cpu(), None);
    assert!(cosine > 0.99 && largest > CPU_DISTANCE, "{cosine} {largest}");
}

/// Forges a checkpoint for one mode with nothing but its sizes.
fn forge_unseen(folder: &Path, mode: &str, target: Option<&'static str>, out: &Path) -> PathBuf {
    let processor: Value = files::json(&folder.join("preprocessor_config.json"));
    let number = |key: &str| processor.pointer(key).and_then(Value::as_u64);
    let pixels = number("/size/longest_edge").or(number("/max_pixels")).unwrap();
    let patch = number("/patch_size").unwrap();
    let (key, value) = match mode {
        "native" => ("image-patches", (pixels / (patch * patch)).to_string()),
        _ => ("image-size", Sights::of(folder).fixed.to_string()),
    };
    let mut options = ForgeOptions::new(out);
    options.max_ctx = Some(128);
    options.prefill = Some(vec![11]);
    set(&mut options, &[(key, &value)]);
    options.compiler = target.map(backends::compiler);
    forge(folder, &options, &mut Silent).unwrap().manifest
}

/// Compares all that the goldens of a checkpoint have, in each mode; logits and features differ by `distance` at most.
fn unseen(folder: &Path, distance: f64) {
    let sights = Sights::of(folder);
    let config: Value = files::json(&folder.join("config.json"));
    let layers = config.pointer("/vision_config/deepstack_visual_indexes");
    let layers = layers.and_then(Value::as_array).map_or(0, Vec::len);
    for mode in ["native", "fixed"] {
        let out = tempfile::tempdir().unwrap();
        let bundle = forge_unseen(folder, mode, None, &out.path().join("bundle"));
        let mut model = tiny::open(&bundle, backends::cpu()).unwrap();
        let cases = sights.of_mode(mode);
        assert!(cases.len() > 1);
        sights.greedy_exact(&mut model, &cases, mode);
        let Distance { largest, .. } = sights.step_exact(&mut model, &cases, mode);
        let dumps = ["features", "positions"].map(|name| out.path().join(name));
        dumps.iter().for_each(|folder| fs::create_dir(folder).unwrap());
        let [features, positions] = dumps;
        let mut model = dumping(&bundle, backends::cpu(), &features);
        let film = mode == "native" && sights.has_film();
        let (cosine, off) = sights.features(model.op_mut(), &features, mode, None, film, layers);
        let mut model = dumping(&bundle, backends::cpu(), &positions);
        sights.same_positions(model.op_mut(), &positions, mode);
        eprintln!(
            "{mode}: logits differ by at most {largest:.2e}, features by {off:.2e}, cosine {cosine:.8}"
        );
        assert!(largest <= distance && off <= distance && cosine >= 0.999_99);
    }
}

/// Other patches and merged squares, a single frame in a patch, two deepstack features, biases in the attention, a head
/// of its own, f16, and the new spelling of the configuration.
#[test]
fn other_dimensions_give_the_references_tokens_and_logits() {
    unseen(&fixture("qwen3vl-unseen"), CPU_DISTANCE);
}

/// Windows that cut through images and videos, RMSNorm and gated MLPs in the tower, sections of the rope behind each
/// other, a video as one run with broken steps in time, and the published spelling of the configuration.
#[test]
fn qwen2_5_vl_gives_the_reference_s_features_and_logits() {
    unseen(&fixture(WINDOWED), 1e-4);
}

/// LayerNorm and a sigmoid of 1.702 x in the tower, its width beside the decoder's, a video whose patches in time are
/// one position apart, and one file of limits for images and videos.
#[test]
fn qwen2_vl_gives_the_reference_s_features_and_logits() {
    unseen(&fixture(OLDER), 1e-4);
}

#[tier(qnn)]
fn the_npu_gives_the_reference_s_tokens_of_qwen2_vl() {
    on_the_npu(OLDER);
}

#[tier(qnn)]
fn the_npu_gives_the_reference_s_tokens_of_qwen2_5_vl() {
    on_the_npu(WINDOWED);
}

fn on_the_npu(checkpoint: &str) {
    let folder = fixture(checkpoint);
    let sights = Sights::of(&folder);
    let targets = if full_matrix() { &["v81", "v73"][..] } else { &["v81"] };
    for target in targets {
        let out = tempfile::tempdir().unwrap();
        let bundle = forge_unseen(&folder, "native", Some(target), &out.path().join("bundle"));
        let mut model = tiny::open(&bundle, backends::qnn()).unwrap();
        let mut cases = sights.of_mode("native");
        if !full_matrix() {
            cases.retain(|case| ["native-boat", "video"].contains(&case.id.as_str()));
        }
        sights.greedy_exact(&mut model, &cases, target);
        let Distance { largest, .. } = sights.step_exact(&mut model, &cases, target);
        let dump = out.path().join("dump");
        fs::create_dir(&dump).unwrap();
        let mut model = dumping(&bundle, backends::qnn(), &dump);
        let (cosine, off) =
            sights.features(model.op_mut(), &dump, "native", Some(&["boat"]), false, 0);
        eprintln!(
            "{target}: logits differ by at most {largest:.2e}, features by {off:.2e}, cosine {cosine:.7}"
        );
        assert!(cosine >= 0.9999, "{target}: features have the cosine {cosine}");
    }
}

/// Any other checkpoint with goldens, such as one that `tests/oracle/qwen3vl_unseen.py` made.
#[tier(by_hand = "QHX_TEST_QWEN3VL")]
fn a_named_checkpoint_gives_the_references_tokens_and_logits() {
    unseen(Path::new(&std::env::var_os("QHX_TEST_QWEN3VL").unwrap()), CPU_DISTANCE);
}

/// On the emulator of the NPU: some cases, or all architectures, and on the newest ones all cases. Not v68, beside
/// which the emulator executes nothing for other chips.
#[tier(qnn)]
fn the_npu_gives_the_reference_s_tokens() {
    let few = ["native-tower", "two-native-train-fish"];
    let forms = [
        (Form { target: Some("v81"), shards: 1, prompt: 16, ..NATIVE }, None),
        (Form { target: Some("v79"), prompt: 16, ..FIXED }, None),
        (Form { target: Some("v75"), shards: 1, prompt: 0, ..NATIVE }, None),
        (Form { target: Some("v81"), shards: 1, prompt: 16, int8: true, ..NATIVE }, Some(0.99)),
        (Form { target: Some("v73"), shards: 1, prompt: 0, ..NATIVE }, None),
        (Form { target: Some("v69"), shards: 1, prompt: 0, ..NATIVE }, None),
        (Form { target: Some("v69"), shards: 1, prompt: 0, int8: true, ..NATIVE }, Some(0.99)),
    ];
    let count = if full_matrix() { forms.len() } else { 1 };
    for (index, (form, int8)) in forms[..count].iter().enumerate() {
        let label = format!("{form:?}");
        let all = full_matrix() && index < 2;
        let mut model = tiny::open(&form.bundle(), backends::qnn()).unwrap();
        let mut cases = sights().of_mode(form.mode());
        if !all {
            cases.retain(|case| few.contains(&case.id.as_str()));
        }
        sights().greedy_exact(&mut model, &cases, &label);
        let Distance { largest, .. } = sights().step_exact(&mut model, &cases[..1], &label);
        drop(model);
        let shown = (!all).then_some(&["tower", "sun"][..]);
        let (cosine, off) = features(*form, backends::qnn(), shown);
        eprintln!(
            "{label}: logits differ by at most {largest:.2e}, features by {off:.2e}, cosine {cosine:.7}"
        );
        assert!(cosine >= int8.unwrap_or(0.9999), "{label}: features have the cosine {cosine}");
    }
}
