//! Cases of goldens, and checks that every recogniser has to pass that generates text.

use qhx::golden::Golden;
use qhx::{Bundle, TranscribeOptions, Transcriber};
use qhx_base::compare::Distance;
use qhx_core::engine::{Model, Part, Prompt, Request};
use qhx_core::op::{AudioRules, Segment};
use qhx_forge::{ForgeOptions, Precision};
use qhx_media::{Limits, Source};
use qhx_tests::forged::{Dumping, Forged, set};
use qhx_tests::replay::generate;
use qhx_tests::tiny::{self, golden_tensor};
use qhx_tests::{backends, has};
use qhx_types::Media;
use serde::Deserialize;

/// Largest distance of an array on the CPU, which differs by rounding only.
const CPU_DISTANCE: f64 = 1e-4;
pub(super) const RATE: u32 = 16_000;

/// Path of a clip, which lies with the Whisper tiny model.
pub(super) fn file(name: &str) -> std::path::PathBuf {
    tiny::fixture("whisper-tiny").join(name)
}

/// The clip of a file.
pub(super) fn clip(name: &str) -> Media {
    let source = Source::File(file(name));
    let audio = qhx_media::decode_audio(&source, &AudioRules::default(), &Limits::default());
    audio.unwrap().into_media().unwrap()
}

/// A clip, what is asked of it, and what the reference answers.
#[derive(Debug, Deserialize)]
pub(super) struct Case {
    /// Name where one clip has several cases.
    id: Option<String>,
    pub(super) clip: String,
    /// Code or name, as the checkpoint has them.
    pub(super) language: Option<String>,
    into: Option<String>,
    punctuation: Option<bool>,
    /// Tokens with those that stand for the clip.
    #[serde(default)]
    prompt_ids: Vec<u32>,
    pub(super) output_ids: Vec<u32>,
    pub(super) text: String,
    /// Rows that an encoder makes of the clip.
    #[serde(default)]
    rows: usize,
}

#[derive(Debug, Deserialize)]
struct Goldens {
    cases: Vec<Case>,
}

impl Case {
    /// The clip at the position of the first token, then the other tokens.
    pub(super) fn in_front(&self) -> Vec<Part> {
        let behind = self.prompt_ids.get(1..).map(|ids| Part::Tokens(ids.to_vec()));
        [Part::Media(clip(&self.clip))].into_iter().chain(behind).collect()
    }

    /// The clip between two texts.
    pub(super) fn between(&self, before: &str, behind: &str) -> Vec<Part> {
        let [before, behind] = [before, behind].map(|text| Part::Text(text.to_owned()));
        vec![before, Part::Media(clip(&self.clip)), behind]
    }

    /// Options of a user's request.
    pub(super) fn options(&self) -> TranscribeOptions {
        let mut options = TranscribeOptions::default()
            .with_language(self.language.clone())
            .with_max_new(self.output_ids.len());
        if let Some(into) = &self.into {
            options = options.with_into(into.clone());
        }
        if let Some(punctuation) = self.punctuation {
            options = options.with_punctuation(punctuation);
        }
        options
    }

    fn name(&self) -> &str {
        self.id.as_deref().unwrap_or_else(|| self.stem())
    }

    fn stem(&self) -> &str {
        self.clip.trim_end_matches(".wav")
    }
}

/// A tiny model that generates text from a clip.
#[derive(Clone, Copy, Debug)]
pub(super) struct Recogniser {
    /// Name of its fixture.
    pub(super) name: &'static str,
    /// Prompt of a case.
    pub(super) prompt: fn(&Case) -> Vec<Part>,
}

impl Recogniser {
    /// The cases of its goldens.
    pub(super) fn cases(&self) -> Vec<Case> {
        tiny::golden_json::<Goldens>(self.name).cases
    }

    /// A bundle for windows of one and two seconds.
    pub(super) fn bundle(&self, change: impl FnOnce(&mut ForgeOptions)) -> Forged {
        Forged::of(&tiny::fixture(self.name), |options| {
            set(options, &[("windows", "1,2")]);
            change(options);
        })
    }

    /// Asserts that a model says what the reference says.
    pub(super) fn says_the_same(&self, model: &mut Model, cases: &[Case], label: &str) {
        for case in cases {
            let label = format!("{} {label}: {}", self.name, case.name());
            model.reset().unwrap();
            let parts = Prompt::Parts((self.prompt)(case));
            let generation = generate(model, &Request::greedy(parts, case.output_ids.len()));
            assert_eq!(generation.tokens, case.output_ids, "{label}");
            // A clip alone has one position.
            assert_eq!(generation.prompt_tokens, case.prompt_ids.len().max(1), "{label}");
        }
    }

    /// Asserts tokens on the CPU, and arrays by `check`, with bundles of other windows, prompts and shards; a short
    /// clip also through a graph for longer ones, which hides what lies behind it, and behind a longer one, which
    /// leaves its rows there.
    pub(super) fn on_cpu<const N: usize>(
        &self,
        bundles: [(&str, Option<Vec<usize>>, usize); N],
        check: impl Fn(&mut Dumping, &Case),
    ) {
        for (windows, prefill, shards) in bundles {
            let bundle = self.bundle(|options| {
                set(options, &[("windows", windows)]);
                (options.prefill, options.shards) = (prefill, shards);
            });
            let mut cases = self.cases();
            for case in &cases {
                let mut model = Dumping::open(&bundle.manifest, backends::cpu());
                self.says_the_same(&mut model, std::slice::from_ref(case), windows);
                check(&mut model, case);
            }
            cases.reverse();
            self.says_the_same(&mut bundle.on_cpu(), &cases, windows);
        }
    }

    /// Asserts that a dumped array is the beginning of a golden tensor: of logits, those of the prompt are dumped, and
    /// what follows is in the tokens.
    pub(super) fn is_near(&self, model: &mut Dumping, array: &str, tensor: &str) {
        self.near(&model.arrays(array), tensor, CPU_DISTANCE);
    }

    /// Asserts frames of a clip, and rows and logits of a decoder that reads them as tokens.
    pub(super) fn rows_are_near(&self, model: &mut Dumping, case: &Case) {
        for what in ["rows", "logits"] {
            self.is_near(model, what, &format!("{}.{what}", case.stem()));
        }
    }

    /// Asserts keys of the last layer's cross-attention and logits of a decoder that attends to an encoder.
    pub(super) fn keys_are_near(&self, model: &mut Dumping, case: &Case) {
        let tensor = format!("{}.cross_k", case.stem());
        let found = model.arrays("cross_k_1");
        // Columns are rows of the encoder, of which the clip has the first.
        let columns = found.len() / (golden_tensor(self.name, &tensor).len() / case.rows);
        let rows = found.chunks_exact(columns).flat_map(|row| row[..case.rows].iter().copied());
        self.near(&rows.collect::<Vec<f32>>(), &tensor, CPU_DISTANCE);
        self.is_near(model, "logits", &format!("{}.logits", case.name()));
    }

    /// Asserts frames of the clip `one.wav`.
    pub(super) fn frames_are_near(&self, model: &mut Dumping, case: &Case, what: &str, bound: f64) {
        if case.stem() == "one" {
            self.near(&model.arrays(what), &format!("one.{what}"), bound);
        }
    }

    fn near(&self, found: &[f32], tensor: &str, bound: f64) {
        let expected = golden_tensor(self.name, tensor);
        assert!(!found.is_empty() && found.len() <= expected.len(), "{tensor}: {}", found.len());
        let distance = Distance::of(found, &expected[..found.len()]).unwrap().largest;
        eprintln!("{} {tensor}: {distance:.1e}", self.name);
        assert!(distance <= bound, "{} {tensor}: {distance:e}", self.name);
    }

    /// Asserts that clips longer than the bundle takes and such that are none are refused by name.
    pub(super) fn refuses_clips(&self, model: &mut Model, longest: usize, what: &str) {
        let long = vec![0.0; longest + 1];
        for (samples, what) in [(&long[..], what), (&[], "0 samples"), (&[0.0, f32::NAN], "NaN")] {
            let error = model.op_mut().place(Segment::Audio { samples, rate: RATE }).unwrap_err();
            has(error.message(), &[what]);
        }
    }

    /// Asserts the text of every case, as a user asks for it. `language` is a code for that of a case.
    pub(super) fn transcribes(
        &self,
        transcriber: &mut Transcriber,
        language: impl Fn(&Case) -> Option<String>,
    ) {
        let words = |text: &str| text.split_whitespace().collect::<Vec<_>>().join(" ");
        for case in self.cases() {
            let options = case.options().with_language(language(&case));
            transcriber.set_options(&options).unwrap();
            let transcript = transcriber.transcribe(file(&case.clip)).unwrap();
            let [chunk] = &transcript.chunks[..] else { panic!("{:?}", transcript.chunks) };
            assert_eq!(chunk.ids, case.output_ids, "{} {}", self.name, case.name());
            // Lines of an answer are one text.
            assert_eq!(words(&transcript.text), words(&case.text));
            assert_eq!(transcript.language, language(&case));
        }
    }

    /// Asserts that golden steps execute every graph and that all of them pass.
    pub(super) fn steps_are_golden(&self, model: &mut Model) {
        let golden = Golden::make(model, false, &mut |_| ()).unwrap();
        let idle = crate::golden::idle(model);
        assert!(!golden.steps.is_empty() && idle.is_empty(), "{}: {idle:?}", self.name);
        for step in &golden.steps {
            let report = golden.check(model, step).unwrap();
            assert!(report.passed && report.cosine > 0.99999, "{}: {report:?}", self.name);
        }
    }

    /// Asserts the tokens of the NPU library: by default those of one clip.
    pub(super) fn on_npu(&self, target: &str, precision: Precision) {
        let bundle = self.bundle(|options| {
            options.precision = precision;
            options.compiler = Some(backends::compiler(target));
        });
        let mut cases = self.cases();
        if !tiny::full_matrix() {
            cases.truncate(1);
        }
        let label = format!("{target} {}", precision.name());
        self.says_the_same(&mut bundle.open(backends::qnn()), &cases, &label);
    }

    /// The same on both chips and with weights of 8 bits, or by default on one chip.
    pub(super) fn on_npus(&self) {
        let (fp16, int8) = (Precision::Fp16, Precision::W8A16);
        let all = [("v81", fp16), ("v81", int8), ("v73", fp16)];
        for (target, precision) in &all[..if tiny::full_matrix() { 3 } else { 1 }] {
            self.on_npu(target, *precision);
        }
    }

    /// Asserts tokens of another checkpoint, whose folder a variable of the environment names.
    pub(super) fn unseen(&self, variable: &str) {
        let folder = std::path::PathBuf::from(std::env::var_os(variable).unwrap());
        let bundle = Forged::of(&folder, |options| set(options, &[("windows", "1,3")]));
        let text = std::fs::read_to_string(folder.join("goldens.json")).unwrap();
        let goldens: Goldens = serde_json::from_str(&text).unwrap();
        self.says_the_same(&mut bundle.on_cpu(), &goldens.cases, "unseen");
    }
}

/// A transcriber of a bundle on the CPU.
pub(super) fn transcriber(forged: &Forged) -> Transcriber {
    Bundle::open(&forged.manifest).unwrap().transcriber().unwrap()
}
