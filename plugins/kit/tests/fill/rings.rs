//! Ring caches beside full ones: any sequence of steps, chunks, truncations and snapshots shows a token
//! what a plain list of rows would.

use std::sync::{Arc, Mutex};

use qhx_kit::fill::{CausalMask, FloatInput, MASK_VALUE};
use qhx_kit::state::StateCarrier;
use qhx_op::harness::{OpHarness, Step, graph, tensor};
use qhx_op::{DType, ErrorCode, GraphId, GraphInfo, Host, OpenInfo, Result, SnapshotId};

use crate::probe::{opened, probe};

const F32: DType = DType::F32;
/// Positions of the full cache.
const CONTEXT: usize = 40;
/// Tokens of a chunk.
const CHUNK: usize = 4;

/// Sizes of the sliding layer.
#[derive(Debug, Clone, Copy)]
struct Sliding {
    slots: usize,
    window: usize,
    /// The graph inserts the tokens of a step at their slots, instead of taking them apart.
    inserted: bool,
}

/// Xorshift (Marsaglia 2003), so that a failure can be seen again.
struct Random(u64);

impl Random {
    fn below(&mut self, bound: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 % bound as u64) as usize
    }
}

/// Reference for a ring: the value of each position, and which position and value each slot holds.
#[derive(Debug, Clone, Default)]
struct Model {
    rows: Vec<f32>,
    ring: Vec<Option<(usize, f32)>>,
}

impl Model {
    fn push(&mut self, value: f32) {
        let position = self.rows.len();
        let slots = self.ring.len();
        self.ring[position % slots] = Some((position, value));
        self.rows.push(value);
    }

    /// True when a token at `position` finds all that it sees.
    fn holds(&self, position: usize, window: usize) -> bool {
        (position.saturating_sub(window - 1)..position)
            .all(|p| self.ring[p % self.ring.len()] == Some((p, self.rows[p])))
    }
}

/// A graph of `rows` tokens with a full layer and a sliding one.
fn layers(name: &str, rows: usize, sliding: Sliding) -> GraphInfo {
    let local = sliding.slots + if sliding.inserted { 0 } else { rows };
    graph(
        name,
        [
            tensor("x", F32, [rows]),
            tensor("cmask", F32, [rows, CONTEXT + rows]),
            tensor("cmask_local", F32, [rows, local]),
            tensor("past_full", F32, [CONTEXT, 2]),
            tensor("past_local", F32, [2, sliding.slots, 1]),
        ],
        [tensor("new_full", F32, [rows, 2]), tensor("new_local", F32, [2, rows, 1])],
    )
}

/// A graph whose layer reads the sliding layer's rows.
fn reader(name: &str, rows: usize, sliding: Sliding) -> GraphInfo {
    let GraphInfo { mut inputs, .. } = layers(name, rows, sliding);
    inputs.retain(|tensor| tensor.name.ends_with("_local"));
    inputs.push(tensor("row_local", F32, [2, rows, 1]));
    GraphInfo { inputs, ..graph(name, [], []) }
}

/// Values of a cache or of the step's rows that a row of a mask shows, in order of size.
fn seen(mask: &[f32], values: &[f32]) -> Vec<f32> {
    assert_eq!(mask.len(), values.len());
    let mut seen: Vec<f32> = mask
        .iter()
        .zip(values)
        .filter_map(|(mask, value)| match *mask {
            0.0 => Some(*value),
            MASK_VALUE => None,
            other => panic!("{other} in a mask"),
        })
        .collect();
    seen.sort_by(f32::total_cmp);
    seen
}

/// Row `row` of a mask of `rows` rows.
fn row_of(mask: &[f32], rows: usize, row: usize) -> &[f32] {
    let width = mask.len() / rows;
    &mask[row * width..(row + 1) * width]
}

/// Checks what a sliding layer sees of the ring and of the step's rows `x`.
fn attend_local(
    step: &Step<'_>,
    model: &Model,
    x: &[f32],
    real: usize,
    sliding: Sliding,
) -> Result<()> {
    let (past, mask) = (step.input("past_local")?, step.input("cmask_local")?);
    let (first, second) = past.split_at(sliding.slots);
    assert!(first.iter().zip(second).all(|(a, b)| *a == -b), "the blocks differ");
    let mut values = first.to_vec();
    let position = model.rows.len();
    if sliding.inserted {
        for (row, value) in x.iter().enumerate() {
            values[(position + row) % sliding.slots] = *value;
        }
    } else {
        values.extend(x);
    }
    for row in 0..real {
        let all: Vec<f32> = model.rows.iter().chain(&x[..=row]).copied().collect();
        let mut last = all[all.len().saturating_sub(sliding.window)..].to_vec();
        last.sort_by(f32::total_cmp);
        let found = seen(row_of(&mask, x.len(), row), &values);
        assert_eq!(found, last, "{} at position {position}", step.graph());
    }
    Ok(())
}

/// Stands in for a graph: checks what its attention would see, and gives the values of x as rows,
/// twice: in two columns or in two blocks.
fn attend(step: &mut Step<'_>, model: &Model, real: usize, sliding: Sliding) -> Result<()> {
    if step.graph().starts_with("reader") {
        let rows = step.input("row_local")?;
        return attend_local(step, model, &rows[..rows.len() / 2], real, sliding);
    }
    let x = step.input("x")?;
    attend_local(step, model, &x, real, sliding)?;
    let (past, mask) = (step.input("past_full")?, step.input("cmask")?);
    assert!(past.chunks(2).all(|row| row[0] == -row[1]), "the columns differ");
    let values: Vec<f32> = past.chunks(2).map(|row| row[0]).chain(x.iter().copied()).collect();
    for row in 0..real {
        let mut all: Vec<f32> = model.rows.iter().chain(&x[..=row]).copied().collect();
        all.sort_by(f32::total_cmp);
        assert_eq!(seen(row_of(&mask, x.len(), row), &values), all, "full cache");
    }
    let columns: Vec<f32> = x.iter().flat_map(|v| [*v, -*v]).collect();
    let blocks: Vec<f32> = x.iter().copied().chain(x.iter().map(|v| -*v)).collect();
    step.set("new_full", &columns)?;
    step.set("new_local", &blocks)
}

/// The graphs of a step with what the host fills.
struct Pass {
    graphs: [GraphId; 2],
    x: FloatInput,
    masks: [qhx_kit::fill::StepMask; 2],
}

impl Pass {
    fn open(host: &mut Host, names: [&str; 2], rows: usize, sliding: Sliding) -> Result<Self> {
        let graphs = names.map(|name| host.find_graph(name).unwrap());
        let local = CausalMask::new(sliding.slots).named("cmask_local").window(sliding.window);
        Ok(Self {
            graphs,
            x: FloatInput::require(host, graphs[0], "x")?,
            masks: [
                CausalMask::new(CONTEXT).bind(host, &graphs, rows)?,
                local.ring().bind(host, &graphs, rows)?,
            ],
        })
    }
}

fn any_sequence_shows_what_a_list_would(sliding: Sliding, seed: u64) -> Result<()> {
    let model = Arc::new(Mutex::new((Model::default(), 0)));
    model.lock().unwrap().0.ring = vec![None; sliding.slots];
    let shared = model.clone();
    let harness = OpHarness::new()
        .graph(layers("one", 1, sliding))
        .graph(reader("reader", 1, sliding))
        .graph(layers("chunk", CHUNK, sliding))
        .graph(reader("reader_chunk", CHUNK, sliding))
        .script(move |step| {
            let (model, real) = &*shared.lock().unwrap();
            attend(step, model, *real, sliding)
        });
    let mut op = probe(harness, move |host| {
        let mut passes = [
            Pass::open(host, ["one", "reader"], 1, sliding)?,
            Pass::open(host, ["chunk", "reader_chunk"], CHUNK, sliding)?,
        ];
        let groups = passes.each_ref().map(|pass| pass.graphs);
        let mut state =
            StateCarrier::with_rings(host, &groups.each_ref().map(|g| &g[..]), |role| {
                (role == "local").then_some(sliding.window)
            })?;
        assert_eq!(state.capacity(), Some(CONTEXT));
        assert_eq!(state.capacity_of("local"), Some(sliding.slots));
        let mut random = Random(seed);
        let mut saved: Vec<(SnapshotId, Model)> = Vec::new();
        let mut value = 0.0;
        Ok(Box::new(move |host, _| {
            let mut guard = model.lock().unwrap();
            let position = guard.0.rows.len();
            assert_eq!(state.position(), position);
            match random.below(12) {
                0..7 => {
                    let pass = random.below(2);
                    let (rows, pass) = ([1, CHUNK][pass], &mut passes[pass]);
                    let real = (1 + random.below(rows)).min(CONTEXT - position);
                    if real == 0 {
                        return Ok(());
                    }
                    let mut x = vec![0.0; rows];
                    for x in &mut x {
                        value += 1.0;
                        *x = value;
                    }
                    let bad = random.below(8) == 0;
                    guard.1 = real;
                    drop(guard);
                    pass.x.write(host, &x)?;
                    pass.masks.iter_mut().for_each(|mask| mask.fill(host, position));
                    pass.graphs.iter().try_for_each(|&graph| host.execute(graph))?;
                    let group = usize::from(rows > 1);
                    if bad {
                        // A step that is not taken over leaves all as it was.
                        assert!(state.commit(host, group, rows + 1).is_err());
                        return Ok(());
                    }
                    state.commit(host, group, real)?;
                    let mut guard = model.lock().unwrap();
                    x[..real].iter().for_each(|v| guard.0.push(*v));
                }
                7..9 => {
                    let back = [4, 20][random.below(2)];
                    let target = position.saturating_sub(random.below(back));
                    let possible =
                        target == position || target == 0 || guard.0.holds(target, sliding.window);
                    match state.truncate(target) {
                        Ok(()) => {
                            assert!(possible, "truncated to {target} of {position}");
                            guard.0.rows.truncate(target);
                            if target == 0 {
                                guard.0.ring.fill(None);
                            }
                        }
                        Err(error) => {
                            assert!(!possible, "{error}");
                            assert_eq!(error.code(), ErrorCode::UNSUPPORTED);
                            assert!(error.message().contains("past_local"), "{error}");
                        }
                    }
                }
                9 => saved.push((state.snapshot(host), guard.0.clone())),
                10 if !saved.is_empty() => {
                    let index = random.below(saved.len());
                    let (id, model) = &saved[index];
                    state.restore(host, *id)?;
                    guard.0 = model.clone();
                    if random.below(3) == 0 {
                        state.drop_snapshot(*id);
                        saved.remove(index);
                    }
                }
                11 if random.below(4) == 0 => {
                    state.reset(host);
                    guard.0.rows.clear();
                    guard.0.ring.fill(None);
                }
                _ => {}
            }
            Ok(())
        }))
    })?;
    for _ in 0..400 {
        op.decode(0)?;
    }
    assert!(op.executions("one") > 40 && op.executions("chunk") > 40, "little was run");
    Ok(())
}

#[test]
fn rings_and_full_caches_show_what_a_list_of_rows_would() {
    for (slots, window, inserted) in [
        (6, 5, false),
        (6, 7, false),
        (4, 1, false),
        (5, 3, false),
        (7, 2, false),
        (8, 5, true),
        (11, 5, true),
        (CONTEXT, 9, false),
    ] {
        for seed in 1..7 {
            let sliding = Sliding { slots, window, inserted };
            any_sequence_shows_what_a_list_would(sliding, 0x9e37_79b9 * seed)
                .unwrap_or_else(|error| panic!("{sliding:?}, seed {seed}: {error}"));
        }
    }
}

/// A carrier over a graph for one token and one for `chunk`, with a ring of `slots`.
fn ring(slots: usize, chunk: usize, window: usize) -> Result<(Option<usize>, [bool; 3])> {
    let result = Arc::new(Mutex::new((None, [false; 3])));
    let shared = result.clone();
    let cache = |name: &str, rows| {
        let inputs = [tensor("past_full", F32, [16, 2]), tensor("past_local", F32, [slots, 2])];
        graph(
            name,
            inputs,
            [tensor("new_full", F32, [rows, 2]), tensor("new_local", F32, [rows, 2])],
        )
    };
    let harness = OpHarness::new().graph(cache("one", 1)).graph(cache("chunk", chunk));
    opened(harness, move |host| {
        let graphs = [host.require_graph("/", "one")?, host.require_graph("/", "chunk")?];
        let groups = [&graphs[..1], &graphs[1..]];
        let rings = |role: &str| (role == "local").then_some(window);
        let state = StateCarrier::with_rings(host, &groups, rings)?;
        let describe = |max_ctx| {
            let mut info = OpenInfo { max_ctx, ..OpenInfo::default() };
            state.describe(&mut info);
            assert!(info.can_snapshot);
            info.can_truncate
        };
        *shared.lock().unwrap() =
            (state.capacity(), [state.can_truncate(), describe(16), describe(8)]);
        Ok(())
    })?;
    let found = *result.lock().unwrap();
    Ok(found)
}

#[test]
fn only_a_ring_of_the_whole_context_can_always_be_truncated() {
    assert_eq!(ring(16, 4, 8).unwrap(), (Some(16), [true, true, true]));
    assert_eq!(ring(8, 4, 8).unwrap(), (Some(16), [false, false, true]));
    assert_eq!(ring(7, 4, 8).unwrap(), (Some(16), [false, false, false]));
}

#[test]
fn a_ring_that_is_too_small_is_refused_on_opening() {
    let message = ring(6, 7, 5).unwrap_err().to_string();
    for part in ["\"chunk\"", "past_local f32[6, 2]", "7 rows does not fit a ring of 6 slots"] {
        assert!(message.contains(part), "{message:?} lacks {part:?}");
    }
    let message = ring(6, 4, 8).unwrap_err().to_string();
    for part in ["\"one\"", "past_local f32[6, 2]", "ring of 6 slots", "window of 8 positions"] {
        assert!(message.contains(part), "{message:?} lacks {part:?}");
    }
    assert!(ring(6, 6, 7).is_ok());
}
