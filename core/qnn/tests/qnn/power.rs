//! Power votes, call by call, over the provider in between.

use std::time::{Duration, Instant};

use qhx_fake_device::{Control, Plan, Report, Then};
use qhx_qnn::PerfMode;

use crate::between::{backend_over, fake};
use crate::*;

/// Vote while nothing is wanted.
const RELEASED: [&str; 3] = [
    "dcvs 1 mode 0x4 latency 2000 sleep 0 bus 0x30 0x30 0x30 core 0x30 0x30 0x30",
    "rpc latency 0",
    "rpc polling 0",
];
const BURST: [&str; 3] = [
    "dcvs 0 mode 0x10 latency 40 sleep 0 bus 0xa0 0xa0 0xa0 core 0xa0 0xa0 0xa0",
    "rpc latency 100",
    "rpc polling 9999",
];

fn report(control: &Control) -> Report {
    control.report().unwrap()
}

#[tier(qnn)]
fn each_power_mode_votes_and_takes_its_votes_back() {
    let (real, control) = fake();
    let open = |perf| backend_over(&control, &real, QnnOptions { perf, ..QnnOptions::default() });
    let backend = open("burst".parse().unwrap());
    let modes = [
        ("sustained", 0, 100, 0x80, 9999),
        ("high", 0, 100, 0x80, 9999),
        ("balanced", 1, 1000, 0x70, 0),
        ("low-balanced", 1, 1000, 0x60, 0),
        ("high-power-saver", 1, 1000, 0x50, 0),
        ("low", 1, 1000, 0x40, 0),
        ("low-power-saver", 1, 1000, 0x30, 0),
    ];
    let mut expected = BURST.map(str::to_owned).to_vec();
    for (name, dcvs, latency, corner, polling) in modes {
        backend.set_perf(name.parse().unwrap()).unwrap();
        let corners = format!("{corner:#x} {corner:#x} {corner:#x}");
        expected.push(format!(
            "dcvs {dcvs} mode 0x10 latency {latency} sleep 0 bus {corners} core {corners}"
        ));
        expected.push("rpc latency 100".to_owned());
        expected.push(format!("rpc polling {polling}"));
    }
    drop(backend);
    expected.extend(RELEASED.map(str::to_owned));
    let closed = report(&control);
    assert_eq!(closed.votes, expected);
    assert!(closed.alive.is_empty() && closed.violations.is_empty(), "{closed:?}");
    let at = |call: &str| closed.order.iter().rposition(|name| name == call).unwrap();
    assert!(at("setPowerConfig") < at("destroyPowerConfigId"), "{:?}", closed.order);

    // A chip without RPC latency has clocks and polling; one without votes does its work all the same.
    control.set(&Plan::at("setPowerConfig", 2, Then::Fail(13002))).unwrap();
    assert!(open(PerfMode::Burst).info().details.contains(&"power mode: burst".to_owned()));
    assert_eq!(report(&control).votes[..3], BURST);
    control.set(&Plan::at("createPowerConfigId", 1, Then::Fail(1000))).unwrap();
    let info = open(PerfMode::Burst).info();
    assert!(info.details.contains(&"power mode: left to the device".to_owned()), "{info:?}");
    control.set(&Plan::default()).unwrap();
    drop(open(PerfMode::DeviceDefault));
    assert!(report(&control).votes.is_empty());
}

#[tier(qnn)]
fn a_power_mode_can_be_set_after_the_device_default() {
    let (real, control) = fake();
    let perf = PerfMode::DeviceDefault;
    let backend = backend_over(&control, &real, QnnOptions { perf, ..QnnOptions::default() });
    backend.set_perf(PerfMode::Burst).unwrap();
    assert_eq!(report(&control).votes, BURST);
    drop(backend);
    assert_eq!(report(&control).votes, [BURST, RELEASED].concat());
}

/// Waits until as many votes were made.
fn wait(control: &Control, votes: usize) -> Report {
    let start = Instant::now();
    loop {
        let report = report(control);
        if report.votes.len() >= votes || start.elapsed() > Duration::from_secs(20) {
            return report;
        }
        std::thread::sleep(Duration::from_millis(5));
    }
}

#[tier(qnn)]
fn votes_are_taken_back_while_idle_until_an_execution() {
    let (real, control) = fake();
    let binary = linear_binary(&real, Target::V81, 5);
    let (input, _) = f16s(&numbers(1, K));
    let options =
        QnnOptions { idle_release: Some(Duration::from_millis(30)), ..QnnOptions::default() };
    let mut session = Session::open(backend_over(&control, &real, options), &binary);
    let pair = [BURST, RELEASED].concat();
    // Whatever was given back before this run, the last is.
    session.run(0, &input);
    let start = Instant::now();
    while !report(&control).votes.ends_with(&RELEASED.map(str::to_owned)) {
        assert!(start.elapsed() < Duration::from_secs(20), "{:?}", report(&control).votes);
        std::thread::sleep(Duration::from_millis(5));
    }
    control.set(&Plan::default()).unwrap();
    for round in 1..=3 {
        session.run(0, &input);
        let report = wait(&control, 6 * round);
        assert_eq!(report.votes, pair.repeat(round), "round {round}");
        // There are no more votes while nothing happens.
        std::thread::sleep(Duration::from_millis(100));
        assert_eq!(self::report(&control).votes.len(), 6 * round);
    }
    let calls = report(&control).order;
    let calls: Vec<_> = calls
        .iter()
        .filter(|name| ["setPowerConfig", "graphExecute"].contains(&name.as_str()))
        .collect();
    let last = &calls[calls.len() - 7..];
    assert_eq!(last.iter().position(|name| *name == "graphExecute"), Some(3), "{calls:?}");

    // An execution that takes longer than the time keeps its clocks.
    control.set(&Plan::at("graphExecute", 1, Then::DelayMs(200))).unwrap();
    session.run(0, &input);
    let order = wait(&control, 6).order;
    assert_eq!(order.iter().position(|name| name == "graphExecute"), Some(3), "{order:?}");
    assert_eq!(order.iter().filter(|name| *name == "setPowerConfig").count(), 6, "{order:?}");
    drop(session);
    assert!(report(&control).alive.is_empty());
}
