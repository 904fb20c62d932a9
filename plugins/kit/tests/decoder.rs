//! The kit's decoder on scripted graphs: which graphs a prompt goes through, what they find in their
//! inputs, and what does not fit.

#![allow(clippy::panic, clippy::unwrap_used, reason = "a test that fails does so by panicking")]

use std::cell::Cell;
use std::rc::Rc;

use qhx_kit::decoder::{Chunk, Decoder, DecoderGraphs, Filler, GraphVariant, LayerState, SoftRows};
use qhx_kit::fill::{CausalMask, FloatInput};
use qhx_kit::schema;
use qhx_kit::state::StateCarrier;
use qhx_op::harness::{OpHarness, OpenOp, Step, graph, tensor};
use qhx_op::text::not_taken;
use qhx_op::{
    DType, Error, ErrorCode, Generator, GraphInfo, Host, Modality, Op, OpDescription, OpenInfo,
    Result, Segment, Task, Verification, View,
};
use serde_json::{Value, json};

/// Writes the position of the first token into the input `place`, and that in height into `height`, where a graph
/// has them.
#[derive(Debug, Default)]
struct Place(Vec<[Vec<FloatInput>; 2]>);

impl Filler for Place {
    fn bind(&mut self, host: &mut Host, pass: GraphVariant<'_>) -> Result<()> {
        assert_eq!(pass.index, self.0.len(), "passes come in order");
        let mut bind = |name| FloatInput::bind_all(host, pass.graphs, name);
        self.0.push([bind("place")?, bind("height")?]);
        Ok(())
    }

    fn fill(&mut self, host: &mut Host, chunk: Chunk<'_>) -> Result<()> {
        let [place, height] = &self.0[chunk.pass];
        let [_, row, _] = chunk.track.at(chunk.position);
        place.iter().try_for_each(|i| i.write(host, &[chunk.position as f32]))?;
        height.iter().try_for_each(|i| i.write(host, &[row as f32]))
    }
}

struct TinyModel(Decoder);

impl Op for TinyModel {
    fn describe() -> OpDescription {
        OpDescription {
            name: "tiny".into(),
            tasks: vec![Task::Generate],
            modalities: vec![Modality::Text],
            params_schema: schema::decoder(["place", "height"]),
            ..OpDescription::default()
        }
    }

    fn open(host: &mut Host) -> Result<Self> {
        let graphs = DecoderGraphs::find(host)?;
        let state = StateCarrier::new(host, &graphs.groups())?;
        let kinds = [LayerState::Caches(&["k"]), LayerState::States(&["a", "b"])];
        graphs.check_layers(host, &state, &kinds)?;
        let mask = CausalMask::new(state.capacity().unwrap_or(0));
        let decoder = Decoder::builder("tiny", graphs, state);
        decoder.mask(mask).filler(Place::default()).open(host).map(Self)
    }

    fn info(&self) -> OpenInfo {
        self.0.info()
    }

    fn generator(&mut self) -> Option<&mut dyn Generator> {
        Some(self)
    }
}

impl Generator for TinyModel {
    qhx_op::inner_generator!(0);

    /// An image becomes a soft token [r, g] for each pixel, [r, NaN] with b = 1, and [r] with b = 2. With b = 3 they
    /// see each other.
    fn prefill(&mut self, host: &mut Host, segments: &[Segment<'_>]) -> Result<View> {
        if segments
            .iter()
            .all(|segment| matches!(segment, Segment::Tokens(_) | Segment::Audio { .. }))
        {
            return self.0.prefill(host, segments);
        }
        let before = self.0.state().position();
        let (mut tokens, mut rows): (_, Vec<(_, Vec<f32>)>) = (Vec::new(), Vec::new());
        for segment in segments {
            match segment {
                Segment::Tokens(text) => tokens.extend_from_slice(text),
                &Segment::Image { rgb, width, height } => {
                    let track = self.0.state_mut().track_mut();
                    track.place(before + tokens.len(), height as usize, width as usize)?;
                    let pixels = rgb.chunks_exact(3);
                    rows.push((
                        tokens.len(),
                        pixels
                            .flat_map(|p| match p {
                                [r, _, 1] => vec![f32::from(*r), f32::NAN],
                                [r, _, 2] => vec![f32::from(*r)],
                                _ => vec![f32::from(p[0]), f32::from(p[1])],
                            })
                            .collect(),
                    ));
                    tokens.resize(tokens.len() + rgb.len() / 3, 0);
                }
                _ => panic!("{segment:?}"),
            }
        }
        let together = segments
            .iter()
            .any(|segment| matches!(segment, Segment::Image { rgb: [_, _, 3, ..], .. }));
        let soft: Vec<_> = rows
            .iter()
            .map(|(first, values)| {
                let together = if together { values.len() / 2 } else { 0 };
                SoftRows { first: *first, values, together, prefix: false }
            })
            .collect();
        let result = self.0.prefill_soft(host, &tokens, &soft);
        if result.is_err() {
            let position = self.0.state().position();
            self.0.state_mut().truncate(position)?;
        }
        result
    }
}

const F32: DType = DType::F32;

/// Opens an op over these graphs, and `head` if none of them is it. Rows of three tokens in two values: token t is
/// [t, -t].
fn open<O: Op>(
    params: Value,
    manifest: Value,
    graphs: impl Into<Vec<GraphInfo>>,
) -> Result<OpenOp> {
    harness(params, manifest, graphs).open::<O>()
}

fn harness(params: Value, manifest: Value, graphs: impl Into<Vec<GraphInfo>>) -> OpHarness {
    let mut graphs = graphs.into();
    if !graphs.iter().any(|graph| graph.name == "head") {
        graphs.push(head());
    }
    let rows = (0..3_u8).map(f32::from).flat_map(|t| [t, -t]);
    let table: Vec<u8> = rows.flat_map(f32::to_le_bytes).collect();
    OpHarness::new()
        .manifest(json!({
            "artifacts": {"embed": {"path": "embed.bin", "dtype": "f32"}},
            "params": manifest,
            "plan": {"params": params}
        }))
        .file("embed.bin", table)
        .graphs(graphs)
        .script(run)
}

/// Hidden states are those that came in; a cache's new rows are their first values; a state counts the
/// rows; logits are a hidden state and the place in height.
fn run(step: &mut Step<'_>) -> Result<()> {
    let x = step.input("x")?;
    let rows = x.len() / 2;
    let place = step.input("place").map_or(0.0, |place| place[0]);
    let height = step.input("height").map_or(place, |height| height[0]);
    if step.graph() == "head" {
        return step.set("logits", &[x[0], x[1], 7.0]);
    }
    let cached = step.input("past_k_0").ok();
    if let Some(past) = &cached {
        let keys: Vec<_> = x.iter().step_by(2).copied().collect();
        step.set("new_k_0", &keys)?;
        let mask = step.input("cmask")?;
        for (row, mask) in mask.chunks_exact(past.len() + rows).enumerate() {
            let seen = mask.iter().filter(|value| **value == 0.0).count();
            // The rows of an image in one step see each other.
            let both_ways = x[1] == 9.0;
            let tokens = x.chunks_exact(2).take_while(|row| row[1] == 9.0).count();
            let last = if both_ways { (row + 1).max(tokens) } else { row + 1 };
            assert_eq!(seen, place as usize + last, "row {row} at {place}");
        }
    }
    // Without a cache, rows see each other and those before them alone.
    if let (None, Ok(mask)) = (&cached, step.input("cmask")) {
        let keys: Vec<_> = x.iter().step_by(2).copied().collect();
        step.set("new_k_0", &keys)?;
        for (row, mask) in mask.chunks_exact(rows).enumerate() {
            assert_eq!(mask.iter().filter(|value| **value == 0.0).count(), row + 1, "row {row}");
        }
        assert_eq!(place, 0.0, "a text begins");
    }
    // Of the rows, those that are tokens.
    let rows = step.input("valid").map_or(rows as f32, |valid| valid.iter().sum());
    for state in ["a", "b"] {
        if let Ok(past) = step.input(&format!("past_{state}_0")) {
            step.set(&format!("present_{state}_0"), &[past[0] + rows])?;
        }
    }
    let logits: Vec<_> = x.chunks_exact(2).flat_map(|row| [row[0], row[1], height]).collect();
    let given = step.set("y", &x).or_else(|_| step.set("logits", &logits));
    // A graph that only fills a cache gives neither.
    given.or_else(|error| cached.map(drop).ok_or(error))
}

const ROOM: usize = 9;

/// A graph of `rows` tokens with a cache, and the output `out` of `width` values a row.
fn cached(name: &str, rows: usize, out: &str, width: usize) -> GraphInfo {
    within(ROOM, name, rows, out, width)
}

/// The same over a cache of `room` rows.
fn within(room: usize, name: &str, rows: usize, out: &str, width: usize) -> GraphInfo {
    graph(
        name,
        [
            tensor("x", F32, [rows, 2]),
            tensor("place", F32, [1]),
            tensor("cmask", F32, [rows, room + rows]),
            tensor("past_k_0", F32, [room, 1]),
        ],
        [tensor(out, F32, [rows, width]), tensor("new_k_0", F32, [rows, 1])],
    )
}

fn replaced(name: &str, rows: usize) -> GraphInfo {
    let state = |name: &str| tensor(name, F32, [1]);
    graph(
        name,
        [tensor("x", F32, [rows, 2]), state("past_a_0"), state("past_b_0")],
        [tensor("y", F32, [rows, 2]), state("present_a_0"), state("present_b_0")],
    )
}

/// Graphs `one`, `two` and `four` of as many tokens with a cache.
fn all_cached() -> [GraphInfo; 3] {
    [("one", 1), ("two", 2), ("four", 4)].map(|(name, rows)| cached(name, rows, "y", 2))
}

fn head() -> GraphInfo {
    graph("head", [tensor("x", F32, [1, 2])], [tensor("logits", F32, [1, 3])])
}

fn executions<const N: usize>(op: &OpenOp, graphs: [&str; N]) -> [usize; N] {
    graphs.map(|graph| op.executions(graph))
}

#[test]
fn a_prompt_goes_through_few_steps_and_the_head_once() {
    let mut op = of_caches::<TinyModel>();
    assert_eq!((op.info().vocab, op.info().max_ctx), (3, ROOM));
    assert!(op.info().can_truncate && op.info().can_snapshot);

    // Six tokens: four, and two.
    let logits = op.prefill(&[Segment::Tokens(&[1, 2, 1, 2, 1]), Segment::Tokens(&[2])]).unwrap();
    assert_eq!(logits, [2.0, -2.0, 7.0]);
    assert_eq!(executions(&op, ["one", "two", "four", "head"]), [0, 1, 1, 1]);
    assert_eq!(op.bound("one", "past_k_0").unwrap()[..6], [1.0, 2.0, 1.0, 2.0, 1.0, 2.0]);
    assert_eq!(op.progress(), Some((6, 6)));
    // Three more fill the widest but for a row, which counts for nothing.
    assert_eq!(op.prefill(&[Segment::Tokens(&[0, 0, 1])]).unwrap(), [1.0, -1.0, 7.0]);
    assert_eq!((op.position(), op.executions("four")), (9, 2));
    let error = op.decode(1).unwrap_err();
    let expected = "1 tokens at position 9 do not fit into the context of 9 tokens";
    assert_eq!((error.code(), error.message()), (ErrorCode::PROMPT, expected));

    // The calls that the op did not write.
    op.truncate(4).unwrap();
    let saved = op.snapshot().unwrap();
    assert_eq!(op.decode(2).unwrap(), [2.0, -2.0, 7.0]);
    op.restore(saved).unwrap();
    assert_eq!(op.position(), 4);
    op.drop_snapshot(saved);
    assert!(op.restore(saved).is_err());
    op.reset().unwrap();
    assert_eq!(op.position(), 0);
    // A part that the op does not take is the prompt's fault.
    let sound = Segment::Audio { samples: &[], rate: 1 };
    let expected = "tiny takes text only; the prompt has audio";
    for error in [op.place(sound).unwrap_err(), op.prefill(&[sound]).unwrap_err()] {
        assert_eq!((error.code(), error.message()), (ErrorCode::PROMPT, expected));
    }
    let modalities = vec![Modality::Text, Modality::Image, Modality::Video];
    let error =
        not_taken(&OpDescription { modalities, ..TinyModel::describe() }, &Segment::Unknown(9));
    let expected =
        "tiny takes text, images and videos; the prompt has a segment of an unknown kind";
    assert_eq!(error.message(), expected);
}

#[test]
fn an_image_whose_tokens_see_each_other_is_one_step() {
    let mut op = of_caches::<TinyModel>();
    let image = |pixels: usize| [5, 9, 3].repeat(pixels);
    let three = image(3);
    let shown = Segment::Image { rgb: &three, width: 3, height: 1 };
    // Two tokens, the image, and a token: not four and two.
    op.prefill(&[Segment::Tokens(&[1, 2]), shown, Segment::Tokens(&[2])]).unwrap();
    assert_eq!(executions(&op, ["one", "two", "four"]), [1, 1, 1]);
    assert_eq!(op.bound("one", "past_k_0").unwrap()[..6], [1.0, 2.0, 5.0, 5.0, 5.0, 2.0]);
    // At the end, it gives the logits.
    op.reset().unwrap();
    assert_eq!(op.prefill(&[Segment::Tokens(&[1]), shown]).unwrap()[..2], [5.0, 9.0]);
    let five = image(5);
    let error = op.prefill(&[Segment::Image { rgb: &five, width: 5, height: 1 }]).unwrap_err();
    let expected = "5 tokens that see each other, as those of an image do, so that one graph has to take them all; the widest takes \
                    4; forge the bundle with --prefill 5, or a number above it";
    assert_eq!((error.code(), error.message()), (ErrorCode::PROMPT, expected));
}

#[test]
fn a_short_prompt_goes_by_steps_where_they_cost_less() {
    let params = json!({"decode": "one", "prefill": ["four", "two"], "lmhead": "head"});
    let opened = |us: [Option<f64>; 3]| {
        let graphs = all_cached().into_iter().zip(us).map(|(graph, us)| GraphInfo { us, ..graph });
        open::<TinyModel>(params.clone(), json!({}), graphs.collect::<Vec<_>>()).unwrap()
    };
    let graphs = ["one", "two", "four", "head"];
    for (us, expected) in [
        ([Some(70.0), Some(150.0), Some(400.0)], [3, 0, 0, 1]),
        ([Some(70.0), Some(90.0), Some(400.0)], [1, 1, 0, 1]),
        ([Some(70.0), Some(90.0), Some(95.0)], [0, 0, 1, 1]),
        // What is known of some graphs only cannot be compared.
        ([Some(70.0), Some(150.0), None], [0, 0, 1, 1]),
        ([Some(70.0), Some(f64::NAN), Some(400.0)], [0, 0, 1, 1]),
    ] {
        let mut op = opened(us);
        assert_eq!(op.prefill(&[Segment::Tokens(&[1, 0, 2])]).unwrap(), [2.0, -2.0, 7.0]);
        assert_eq!(executions(&op, graphs), expected, "{us:?}");
        assert_eq!(op.bound("one", "past_k_0").unwrap()[..3], [1.0, 0.0, 2.0]);
    }
}

#[test]
fn graphs_without_caches_take_the_first_tokens_of_a_text() {
    let blind = |rows: usize| {
        let mut graph = cached("blind", rows, "y", 2);
        graph.inputs.pop();
        graph.inputs[2] = tensor("cmask", F32, [rows, rows]);
        graph
    };
    let opened = |decode: &str, prefill: Value, graphs: Vec<GraphInfo>| {
        let params = json!({"decode": decode, "prefill": prefill, "lmhead": "head"});
        open::<TinyModel>(params, json!({}), [graphs, vec![cached("one", 1, "y", 2)]].concat())
    };
    let mut op = opened("one", json!("blind"), vec![blind(4)]).unwrap();
    let expected = "its prefill graphs read no caches, and take a text's first tokens alone";
    assert_eq!(op.info().verification.refusal.as_deref(), Some(expected));
    assert_eq!(op.prefill(&[Segment::Tokens(&[1, 2, 1, 0, 2])]).unwrap(), [2.0, -2.0, 7.0]);
    assert_eq!(executions(&op, ["one", "blind"]), [1, 1]);
    op.prefill(&[Segment::Tokens(&[1, 1, 1])]).unwrap();
    assert_eq!(executions(&op, ["one", "blind"]), [4, 1], "a later turn goes by steps");
    let keys = [1.0, 2.0, 1.0, 0.0, 2.0, 1.0, 1.0, 1.0];
    assert_eq!(op.bound("one", "past_k_0").unwrap()[..8], keys);
    op.reset().unwrap();
    op.prefill(&[Segment::Tokens(&[0, 2])]).unwrap();
    assert_eq!(executions(&op, ["one", "blind"]), [4, 2]);

    // Beside graphs that go on, they begin; none of them is what draft tokens are verified by.
    let graphs = vec![blind(4), cached("two", 2, "y", 2)];
    let mut op = opened("one", json!(["blind", "two"]), graphs).unwrap();
    assert_eq!(op.info().verification.widths, [2]);
    op.prefill(&[Segment::Tokens(&[1, 2, 1, 0, 2, 1])]).unwrap();
    assert_eq!(executions(&op, ["one", "two", "blind"]), [0, 1, 1]);

    let mut blind_step = cached("one", 1, "y", 2);
    blind_step.inputs.pop();
    blind_step.name = "step".to_owned();
    let graphs = vec![blind_step, cached("two", 2, "y", 2)];
    let error = opened("step", json!("two"), graphs).unwrap_err();
    assert!(error.message().contains("\"step\" gives rows of caches (new_*)"), "{error}");
}

#[test]
fn without_a_head_the_last_token_goes_where_logits_come_from() {
    let opened = |four: GraphInfo| {
        let params = json!({"decode": "one", "prefill": "four"});
        open::<TinyModel>(params, json!({}), [cached("one", 1, "logits", 3), four]).unwrap()
    };
    let mut op = opened(cached("four", 4, "y", 2));
    assert_eq!(op.prefill(&[Segment::Tokens(&[1, 1, 1, 2])]).unwrap(), [2.0, -2.0, 3.0]);
    assert_eq!(executions(&op, ["one", "four"]), [1, 1]);

    // Where prompts' graphs give logits, too, those of the last row are taken.
    let mut op = opened(cached("four", 4, "logits", 3));
    assert_eq!(op.prefill(&[Segment::Tokens(&[1, 1, 2])]).unwrap(), [2.0, -2.0, 0.0]);
    assert_eq!(executions(&op, ["one", "four"]), [0, 1]);
}

#[test]
fn a_replaced_state_takes_in_full_chunks_only() {
    let mut op = of_states([replaced("one", 1), replaced("four", 4)]).unwrap();
    op.prefill(&[Segment::Tokens(&[1; 7])]).unwrap();
    assert_eq!(executions(&op, ["one", "four", "head"]), [3, 1, 1]);
    assert_eq!(op.bound("one", "past_a_0").unwrap(), [7.0]);
    op.prefill(&[Segment::Tokens(&[1; 4])]).unwrap();
    assert_eq!(executions(&op, ["one", "four", "head"]), [3, 2, 2]);
    assert!(!op.info().can_truncate);
}

#[test]
fn a_step_that_fails_leaves_a_replaced_state_as_it_was() {
    let params = json!({"decode": "one", "lmhead": "head"});
    let fails = Rc::new(Cell::new(""));
    let failing = Rc::clone(&fails);
    let mut op = harness(params, json!({"n_layers": 1, "max_ctx": 20}), [replaced("one", 1)])
        .script(move |step| {
            run(step)?;
            match step.graph() == failing.get() {
                true => Err(Error::new(ErrorCode::EXECUTE, "it was to fail")),
                false => Ok(()),
            }
        })
        .open::<TinyModel>()
        .unwrap();
    op.prefill(&[Segment::Tokens(&[1, 2])]).unwrap();
    // Before the state changes hands: in the graph that writes it, and behind it.
    for (graph, consumed) in [("one", 2), ("head", 3)] {
        fails.set(graph);
        assert_eq!(op.decode(1).unwrap_err().code(), ErrorCode::EXECUTE);
        assert_eq!(op.position(), consumed, "{graph}");
        fails.set("");
        assert_eq!(op.decode(1).unwrap(), [1.0, -1.0, 7.0], "{graph}");
        for state in ["past_a_0", "past_b_0"] {
            assert_eq!(op.bound("one", state).unwrap(), [consumed as f32 + 1.0], "{graph}");
        }
    }
}

#[test]
fn a_state_whose_buffers_cannot_be_exchanged_stays_as_it_was() {
    let mut op = of_states([replaced("one", 1)]).unwrap();
    op.prefill(&[Segment::Tokens(&[1, 2])]).unwrap();
    let states = |op: &OpenOp| ["past_a_0", "past_b_0"].map(|name| op.bound("one", name).unwrap());
    let mut consumed = 2;
    // An input and an output for each of the two states.
    for count in 0..4 {
        op.refuse_bind(count);
        let error = op.decode(1).unwrap_err();
        assert!(error.message().contains("this binding is refused"), "{count}: {error}");
        assert_eq!(op.position(), consumed, "{count}");
        assert_eq!(states(&op), [[consumed as f32], [consumed as f32]], "{count}");
        assert_eq!(op.decode(1).unwrap(), [1.0, -1.0, 7.0], "{count}");
        consumed += 1;
        assert_eq!(states(&op), [[consumed as f32], [consumed as f32]], "{count}");
    }
}

/// `replaced` for graphs with an input for which rows are tokens, and which rows a convolution of 3 keeps.
fn padded(name: &str, rows: usize, keep: [usize; 2]) -> GraphInfo {
    let mut padded = replaced(name, rows);
    padded.inputs.extend([tensor("valid", F32, [rows, 1]), tensor("keep", F32, keep)]);
    padded
}

#[test]
fn a_replaced_state_takes_part_of_a_chunk_with_an_input() {
    let opened = |keep| of_states([replaced("one", 1), padded("four", 4, keep)]);
    let mut op = opened([2, 6]).unwrap();
    op.prefill(&[Segment::Tokens(&[1; 7])]).unwrap();
    assert_eq!(executions(&op, ["one", "four", "head"]), [0, 2, 1]);
    assert_eq!(op.bound("one", "past_a_0").unwrap(), [7.0]);
    assert_eq!(op.bound("four", "valid").unwrap(), [1.0, 1.0, 1.0, 0.0]);
    // Two older rows, three tokens: the last two of these five.
    let third = [0.0, 0.0, 0.0, 1.0, 0.0, 0.0];
    let fourth = [0.0, 0.0, 0.0, 0.0, 1.0, 0.0];
    assert_eq!(op.bound("four", "keep").unwrap(), [third, fourth].concat());
    op.prefill(&[Segment::Tokens(&[1; 4])]).unwrap();
    assert_eq!(op.bound("four", "valid").unwrap(), [1.0; 4]);
    let fifth = [0.0, 0.0, 0.0, 0.0, 0.0, 1.0];
    assert_eq!(op.bound("four", "keep").unwrap(), [fourth, fifth].concat());
    assert_eq!((op.position(), op.executions("four")), (11, 3));

    let error = opened([2, 5]).unwrap_err();
    let expected = "found rows of 5 values, expected 2, as many as it has rows, and the step's 4";
    assert!(error.message().contains("keep") && error.message().contains(expected), "{error}");
}

/// A model of caches alone, whose steps may have four rows.
fn of_caches<O: Op>() -> OpenOp {
    let params = json!({"decode": "one", "prefill": ["four", "two"], "lmhead": "head"});
    open::<O>(params, json!({"n_layers": 1, "vocab": 3}), all_cached()).unwrap()
}

/// A model of replaced states alone: its graphs `one` and, if there is one, `four`.
fn of_states<const N: usize>(graphs: [GraphInfo; N]) -> Result<OpenOp> {
    let mut params = json!({"decode": "one", "lmhead": "head"});
    if N > 1 {
        params["prefill"] = "four".into();
    }
    open::<TinyModel>(params, json!({"n_layers": 1, "max_ctx": 20}), graphs)
}

#[test]
fn rows_of_another_state_are_not_accepted() {
    let mut op = of_caches::<TinyModel>();
    op.prefill(&[Segment::Tokens(&[1, 2])]).unwrap();
    let saved = op.snapshot().unwrap();
    for change in ["restore", "truncate", "reset"] {
        op.verify(&[1, 1]).unwrap();
        match change {
            "restore" => op.restore(saved).unwrap(),
            "truncate" => op.truncate(1).unwrap(),
            _ => op.reset().unwrap(),
        }
        let position = op.position();
        assert!(op.row_logits(0).is_err() && op.accept(1).is_err(), "after {change}");
        assert_eq!(op.position(), position, "after {change}");
    }
}

/// An op that writes `decode` itself and lets nobody verify draft tokens.
struct Refusing(TinyModel);

impl Op for Refusing {
    fn describe() -> OpDescription {
        TinyModel::describe()
    }

    fn open(host: &mut Host) -> Result<Self> {
        TinyModel::open(host).map(Self)
    }

    fn info(&self) -> OpenInfo {
        OpenInfo { verification: Verification::refused("steps of its own"), ..self.0.info() }
    }

    fn generator(&mut self) -> Option<&mut dyn Generator> {
        Some(self)
    }
}

impl Generator for Refusing {
    qhx_op::inner_generator!(0);

    fn decode(&mut self, host: &mut Host, token: u32) -> Result<View> {
        self.0.decode(host, token)
    }
}

#[test]
fn an_op_verifies_draft_tokens_unless_it_opts_out() {
    assert_eq!(of_caches::<TinyModel>().info().verification.widths, [2, 4]);
    let op = of_caches::<Refusing>();
    assert_eq!(op.info().verification.widths, [0_usize; 0]);
    assert_eq!(op.info().verification.refusal.as_deref(), Some("steps of its own"));
}

#[test]
fn draft_tokens_take_one_step_and_the_accepted_ones_stay() {
    let mut op = of_caches::<TinyModel>();
    assert_eq!(op.info().verification.widths, [2, 4]);
    op.prefill(&[Segment::Tokens(&[1, 2])]).unwrap();
    let graphs = ["one", "two", "four", "head"];
    assert_eq!(executions(&op, graphs), [0, 1, 0, 1]);
    op.verify(&[2, 1, 0]).unwrap();
    assert_eq!(op.position(), 2, "nothing is kept yet");
    assert_eq!(op.row_logits(0).unwrap(), [2.0, -2.0, 7.0]);
    assert_eq!(op.row_logits(1).unwrap(), [1.0, -1.0, 7.0]);
    assert!(op.row_logits(3).is_err(), "there are three rows");
    op.accept(2).unwrap();
    assert_eq!((op.position(), executions(&op, graphs)), (4, [0, 1, 1, 3]));
    assert_eq!(op.bound("one", "past_k_0").unwrap()[..5], [1.0, 2.0, 2.0, 1.0, 0.0]);
    assert!(op.accept(1).is_err() && op.row_logits(0).is_err(), "it was kept already");

    // The next step hides what was not accepted, which the script asserts; another step drops it.
    op.verify(&[1, 1]).unwrap();
    assert_eq!(op.decode(2).unwrap(), [2.0, -2.0, 7.0]);
    assert!(op.accept(1).is_err());
    assert_eq!(op.position(), 5);
    // As many as the context holds, and no more.
    op.verify(&[1, 1, 1, 1]).unwrap();
    op.accept(4).unwrap();
    assert_eq!(op.position(), ROOM);
    let error = op.verify(&[1]).unwrap_err();
    assert_eq!(error.message(), "1 tokens at position 9 do not fit into the context of 9 tokens");
    op.reset().unwrap();
    let error = op.verify(&[1; 5]).unwrap_err();
    assert!(error.message().contains("5 tokens") && error.message().contains("[2, 4]"), "{error}");
    assert!(op.verify(&[]).is_err());
}

#[test]
fn a_replaced_state_takes_in_accepted_drafts_alone() {
    let mut op = of_states([replaced("one", 1), padded("four", 4, [2, 6])]).unwrap();
    assert_eq!(op.info().verification.widths, [4]);
    let state = |op: &OpenOp| op.bound("one", "past_a_0").unwrap();
    // All stay: one execution. Some stay: those once more. One stays: a plain step.
    for (keep, expected) in [(3, [0, 1, 1]), (2, [0, 3, 2]), (1, [1, 4, 3])] {
        let before = state(&op)[0];
        op.verify(&[1, 2, 1]).unwrap();
        op.row_logits(keep - 1).unwrap();
        assert_eq!(state(&op), [before]);
        op.accept(keep).unwrap();
        assert_eq!(state(&op), [before + keep as f32]);
        assert_eq!(executions(&op, ["one", "four", "head"]), expected, "{keep} of 3");
    }
    assert_eq!(op.position(), 6);
}

#[test]
fn a_decoder_without_verification_gives_its_reason() {
    let why = |graphs: Vec<GraphInfo>, prefill: Value| {
        let mut params = json!({"decode": "one", "lmhead": "head"});
        if prefill != json!(null) {
            params["prefill"] = prefill;
        }
        let op = open::<TinyModel>(params, json!({"max_ctx": 9}), graphs).unwrap();
        assert!(op.info().verification.widths.is_empty());
        op.info().verification.refusal.clone().unwrap()
    };
    let none = why(vec![cached("one", 1, "y", 2)], json!(null));
    assert!(none.contains("no graphs that take several tokens"), "{none}");
    let untold = why(vec![replaced("one", 1), replaced("four", 4)], json!("four"));
    assert!(untold.contains("no input valid or keep"), "{untold}");
    let mut fill = cached("four", 4, "y", 2);
    fill.outputs.retain(|tensor| tensor.name != "y");
    let short = why(vec![cached("one", 1, "y", 2), fill], json!("four"));
    assert!(short.contains("end before the last layers"), "{short}");
}

#[test]
fn graphs_without_state_see_only_the_last_prompt_token() {
    let params =
        json!({"decode": ["one", "rest"], "prefill": ["four", "four_rest"], "lmhead": "head"});
    let rest = |name: &str, rows: usize| {
        graph(name, [tensor("x", F32, [rows, 2])], [tensor("y", F32, [rows, 2])])
    };
    let step = || [cached("one", 1, "y", 2), rest("rest", 1)];
    let four = [cached("four", 4, "y", 2), rest("four_rest", 4)];
    let mut op = open::<TinyModel>(params, json!({}), [step(), four].concat()).unwrap();
    let graphs = ["one", "rest", "four", "four_rest", "head"];
    assert_eq!(op.prefill(&[Segment::Tokens(&[1, 1, 1, 1, 1, 2])]).unwrap(), [2.0, -2.0, 7.0]);
    assert_eq!(executions(&op, graphs), [0, 0, 2, 1, 1]);
    assert_eq!(op.decode(1).unwrap(), [1.0, -1.0, 7.0]);
    assert_eq!(executions(&op, graphs), [1, 1, 2, 1, 2]);

    // Prefill graphs may end with the last state: they give no y.
    let mut fill = cached("four", 4, "y", 2);
    fill.outputs.retain(|tensor| tensor.name != "y");
    let params = json!({"decode": ["one", "rest"], "prefill": "four", "lmhead": "head"});
    let mut op = open::<TinyModel>(params, json!({}), [&step()[..], &[fill]].concat()).unwrap();
    let graphs = ["one", "rest", "four", "head"];
    assert_eq!(op.prefill(&[Segment::Tokens(&[1, 1, 1, 1, 1, 2])]).unwrap(), [2.0, -2.0, 7.0]);
    assert_eq!(executions(&op, graphs), [2, 1, 1, 1]);
    assert_eq!(op.bound("one", "past_k_0").unwrap()[..6], [1.0, 1.0, 1.0, 1.0, 1.0, 2.0]);
}

#[test]
fn soft_tokens_stand_where_the_prompt_has_them() {
    let pixels = [10, 11, 0, 20, 21, 0, 30, 31, 0, 40, 41, 0];
    let image =
        |height: u32| Segment::Image { rgb: &pixels[..3 * height as usize], width: 1, height };
    for prefill in [json!(["four", "two"]), json!([])] {
        let mut params = json!({"decode": "one", "lmhead": "head"});
        if prefill != json!([]) {
            params["prefill"] = prefill;
        }
        let mut op = open::<TinyModel>(params, json!({}), all_cached()).unwrap();
        // The first image goes over the border of two chunks.
        let prompt = [Segment::Tokens(&[1, 2]), image(4), Segment::Tokens(&[1]), image(2)];
        assert_eq!(op.prefill(&prompt).unwrap(), [20.0, 21.0, 7.0]);
        let keys = op.bound("one", "past_k_0").unwrap();
        assert_eq!(keys, [1.0, 2.0, 10.0, 20.0, 30.0, 40.0, 1.0, 10.0, 20.0]);
    }
}

#[test]
fn bad_soft_rows_are_no_fault_of_the_prompt_nor_of_the_weights() {
    let params = json!({"decode": "one", "lmhead": "head"});
    let mut op = open::<TinyModel>(params, json!({}), [cached("one", 1, "y", 2)]).unwrap();
    for (pixel, code, says) in [
        (
            [7, 8, 1],
            ErrorCode::EXECUTE,
            "the soft rows from token 1 on have NaN or infinite values",
        ),
        (
            [7, 8, 2],
            ErrorCode::INTERNAL,
            "1 values of soft tokens from token 1 on, expected rows of 2",
        ),
    ] {
        let image = Segment::Image { rgb: &pixel, width: 1, height: 1 };
        let error = op.prefill(&[Segment::Tokens(&[1]), image]).unwrap_err();
        assert_eq!(error.code(), code, "{error}");
        assert!(error.message().contains(says), "{error}");
        assert_eq!(op.position(), 0);
    }
}

/// An op that declares that it takes images, and leaves the prompt to the kit.
struct Placing(Decoder);

impl Op for Placing {
    fn describe() -> OpDescription {
        OpDescription { modalities: vec![Modality::Text, Modality::Image], ..TinyModel::describe() }
    }

    fn open(host: &mut Host) -> Result<Self> {
        TinyModel::open(host).map(|TinyModel(decoder)| Self(decoder))
    }

    fn info(&self) -> OpenInfo {
        self.0.info()
    }

    fn generator(&mut self) -> Option<&mut dyn Generator> {
        Some(&mut self.0)
    }
}

#[test]
fn images_left_to_the_kit_are_an_error_with_what_to_write() {
    let params = json!({"decode": "one", "lmhead": "head"});
    let mut op = open::<Placing>(params, json!({}), [cached("one", 1, "y", 2)]).unwrap();
    let image = Segment::Image { rgb: &[7; 3], width: 1, height: 1 };
    let error = op.prefill(&[Segment::Tokens(&[1]), image]).unwrap_err();
    assert_eq!(error.code(), ErrorCode::UNSUPPORTED);
    assert!(
        error.message().contains("write Generator::prefill over Decoder::prefill_soft"),
        "{error}"
    );
}

#[test]
fn positions_of_images_go_with_the_state() {
    let mut graph = cached("one", 1, "logits", 3);
    graph.inputs.push(tensor("height", F32, [1, 1]));
    let mut op = open::<TinyModel>(json!({"decode": "one"}), json!({}), [graph]).unwrap();
    let square = Segment::Image { rgb: &[9; 12], width: 2, height: 2 };
    let height = |op: &mut OpenOp| op.decode(1).unwrap()[2];
    // Text goes on behind the longer side.
    let prompt = [Segment::Tokens(&[1]), square, Segment::Tokens(&[1])];
    assert_eq!(op.prefill(&prompt).unwrap(), [1.0, -1.0, 3.0]);
    let saved = op.snapshot().unwrap();
    assert_eq!(height(&mut op), 4.0);

    op.truncate(3).unwrap();
    assert_eq!(height(&mut op), 3.0, "behind the image's first row");
    op.truncate(1).unwrap();
    // A prompt that fails at its last token leaves its second image nowhere.
    let dot = Segment::Image { rgb: &[9; 3], width: 1, height: 1 };
    let odd = [square, Segment::Tokens(&[9]), dot];
    assert_eq!(op.prefill(&odd).unwrap_err().code(), ErrorCode::PROMPT);
    assert_eq!((op.position(), height(&mut op)), (5, 3.0));
    assert_eq!(height(&mut op), 4.0);
    op.reset().unwrap();
    assert_eq!([height(&mut op), height(&mut op), height(&mut op)], [0.0, 1.0, 2.0]);
    op.restore(saved).unwrap();
    assert_eq!((op.position(), height(&mut op)), (6, 4.0));
}

#[test]
fn a_step_goes_through_the_smallest_context_that_holds_it() {
    let graphs = ["three", "three5", "one", "one5"];
    let params = json!({
        "decode": "one", "prefill": "three", "within": [["three5", "one5"]], "lmhead": "head"
    });
    let sizes = [(ROOM, "one", 1), (ROOM, "three", 3), (5, "one5", 1), (5, "three5", 3)];
    let all = sizes.map(|(room, name, rows)| within(room, name, rows, "y", 2));
    let mut op = open::<TinyModel>(params, json!({"n_layers": 1}), all).unwrap();
    assert_eq!((op.info().max_ctx, &op.info().verification.widths[..]), (ROOM, &[3][..]));
    op.prefill(&[Segment::Tokens(&[1, 2, 1])]).unwrap();
    op.decode(2).unwrap();
    assert_eq!(executions(&op, graphs), [0, 1, 0, 1]);
    // Three tokens from position 4 on end behind the fifth, two do not where one of them is.
    op.verify(&[1, 1, 1]).unwrap();
    op.accept(1).unwrap();
    assert_eq!((op.position(), executions(&op, graphs)), (5, [1, 1, 0, 1]));
    op.decode(2).unwrap();
    op.truncate(2).unwrap();
    op.verify(&[1, 2]).unwrap();
    op.accept(2).unwrap();
    op.decode(2).unwrap();
    assert_eq!(executions(&op, graphs), [1, 2, 1, 2]);
    assert_eq!(op.bound("one", "past_k_0").unwrap()[..5], [1.0, 2.0, 1.0, 2.0, 2.0]);
}

#[test]
fn what_does_not_fit_is_named() {
    let one = || cached("one", 1, "y", 2);
    let changed = |mut graph: GraphInfo, change: fn(&mut GraphInfo)| {
        change(&mut graph);
        graph
    };
    let lacking = changed(replaced("one", 1), |graph| {
        graph.inputs.retain(|t| t.name != "past_b_0");
        graph.outputs.retain(|t| t.name != "present_b_0");
    });
    let both = changed(replaced("one", 1), |graph| {
        graph.inputs.push(tensor("past_k_0", F32, [ROOM, 1]));
        graph.outputs.push(tensor("new_k_0", F32, [1, 1]));
    });
    let narrow = changed(head(), |head| head.inputs[0].dtype = DType::F16);
    let few = changed(head(), |head| head.outputs[0] = tensor("logits", F32, [1, 2]));
    let next = graph("next", [tensor("x", F32, [1, 3])], [tensor("y", F32, [1, 2])]);
    let silent = changed(within(5, "other", 1, "y", 2), |graph| drop(graph.outputs.remove(0)));
    let names = json!({"decode": "one", "lmhead": "head"});
    let chained = json!({"decode": ["one", "next"], "lmhead": "head"});
    let smaller = json!({"decode": "one", "within": [["other"]], "lmhead": "head"});
    let no_layer = "layer 1: the decode graphs (one) have no past_k_1 and no past_a_1/past_b_1; \
                    expected that of each of the manifest's 2 layers (params.n_layers)";
    let no_row = "x f16[1, 2], the row that graph \"head\"";
    let wide = "x has 2 rows, expected 1 for manifest /plan/params/decode";
    let as_whole =
        "x has 2 rows, expected 1 for manifest /plan/params/within/0, as in the whole context";
    let takes = "hands on y f32[1, 2], but graph \"next\" takes x f32[1, 3]";
    let two_sizes = "\"other\" and \"one\" take 1 rows in contexts of two sizes";
    let layout = "another graph has this cache in another layout";
    for (graphs, params, manifest, expected) in [
        (vec![one()], &names, json!({"n_layers": 2}), [no_layer, ""]),
        (
            vec![lacking],
            &names,
            json!({"n_layers": 1}),
            ["(one) lack past_b_0; the layer's other state is there", ""],
        ),
        (vec![both], &names, json!({"n_layers": 1}), ["both past_k_0 and past_a_0/past_b_0", ""]),
        (vec![one()], &names, json!({"max_ctx": 10}), ["max_ctx is 10", "holds 9 rows"]),
        (
            vec![one()],
            &names,
            json!({"hidden": 3}),
            ["rows of 3 values, the manifest's params.hidden", ""],
        ),
        (
            vec![one(), narrow],
            &names,
            json!({}),
            ["\"one\": tensor y f32[1, 2]: expected 1 times", no_row],
        ),
        (vec![one(), few], &names, json!({}), ["give 2 logits, expected at least 3", ""]),
        (vec![one()], &json!({"decode": "one"}), json!({}), ["has no output \"logits\"", ""]),
        (vec![cached("one", 2, "y", 2)], &names, json!({}), [wide, ""]),
        (vec![one(), next], &chained, json!({}), [takes, ""]),
        (vec![one(), within(5, "other", 2, "y", 2)], &smaller, json!({}), [as_whole, ""]),
        (vec![one(), silent], &smaller, json!({}), [two_sizes, ""]),
        (vec![one(), within(ROOM + 1, "other", 1, "y", 2)], &smaller, json!({}), [layout, ""]),
        (
            vec![],
            &json!({"decode": []}),
            json!({}),
            ["manifest /plan/params/decode: no graph is named", ""],
        ),
    ] {
        let error = open::<TinyModel>(params.clone(), manifest, graphs).unwrap_err();
        assert!(expected.iter().all(|part| error.message().contains(part)), "{error}");
    }
}
