//! Plan of faults and limits for calls, and the report of what happened.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

/// Faults and limits for calls. Setting one zeroes all counts; objects that are alive stay alive.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Plan {
    /// Rules for calls. The first rule that fits a call counts.
    pub rules: Vec<Rule>,
    /// A context beyond this number is refused with 1002, as where no process domain is left.
    pub max_contexts: Option<usize>,
    /// A context with which the binaries loaded have more bytes than this is refused with 1002.
    pub max_context_bytes: Option<u64>,
    /// Registering memory is refused with 1000, as the emulator does.
    pub no_registered_memory: bool,
    /// Contexts may share a spill-fill buffer, which the emulator refuses.
    pub spill_fill: bool,
    /// The chip that the device says it is; without it the emulator's own, an old one.
    pub chip: Option<Chip>,
}

/// A chip, as a device describes itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Chip {
    /// Hexagon architecture: 81 for v81.
    pub arch: u32,
    /// The library's number of the chip.
    pub soc: u32,
    /// Tightly coupled memory in MB.
    pub vtcm_mb: u64,
}

impl Plan {
    /// The `nth` call of all fails with `code`.
    pub fn fail_nth(nth: u64, code: u16) -> Self {
        Self {
            rules: vec![Rule { call: None, nth, times: 1, then: Then::Fail(code) }],
            ..Self::default()
        }
    }

    /// The `nth` call of a function, by its name in the interface, has a fate of its own.
    pub fn at(call: &str, nth: u64, then: Then) -> Self {
        let rule = Rule { call: Some(call.to_owned()), nth, times: 1, then };
        Self { rules: vec![rule], ..Self::default() }
    }
}

/// Effect on one call, or on several in a row.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Rule {
    /// Name of the function, such as `graphExecute`; without it, calls of all functions count.
    #[serde(default)]
    pub call: Option<String>,
    /// The first call that is meant, counted from 1 since the plan was set.
    #[serde(default = "one")]
    pub nth: u64,
    /// Number of calls from there on.
    #[serde(default = "one")]
    pub times: u64,
    /// Effect on these calls.
    pub then: Then,
}

fn one() -> u64 {
    1
}

/// Effect on a call.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Then {
    /// It returns this code. A call that frees something frees it all the same.
    Fail(u16),
    /// It waits this number of milliseconds first.
    DelayMs(u64),
    /// It never returns. When the process exits, the library waits for it, as one does that joins
    /// its threads.
    Hang,
    /// The DSP restarts: the call returns this code, and so does every further use of the
    /// backends, devices and contexts that are open now, until they are freed.
    Restart(u16),
}

/// Record of what happened since the plan was set.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Report {
    /// Calls of all functions.
    pub total: u64,
    /// Calls by name.
    pub calls: BTreeMap<String, u64>,
    /// Names of the first hundred thousand calls, in order.
    pub order: Vec<String>,
    /// Calls that did not reach the real library: name, number among those of the name, code.
    pub failed: Vec<String>,
    /// Calls that do not return.
    pub hanging: u64,
    /// Number of objects made and not freed, by kind.
    pub alive: BTreeMap<String, usize>,
    /// Clock votes, in order and in words.
    pub votes: Vec<String>,
    /// Executions that reached the real library.
    pub executions: u64,
    /// Bytes of the tensors of those executions.
    pub bytes: Bytes,
    /// Memory registered.
    pub registered: u64,
    /// Contexts opened that have a spill-fill buffer for others, and those that use it.
    pub spill_fill: [u64; 2],
    /// Rules that callers broke.
    pub violations: Vec<String>,
}

/// Bytes of tensors at execution. A device copies what is raw.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Bytes {
    /// Bytes of plain memory.
    pub raw: u64,
    /// Bytes of registered memory.
    pub registered: u64,
}

/// True for calls that may fail without harm: they free something, or what they ask for can be done
/// without.
pub fn is_spared(call: &str) -> bool {
    const SPARED: [&str; 9] = [
        "backendGetBuildId",
        "createPowerConfigId",
        "destroyPowerConfigId",
        "deviceFreePlatformInfo",
        "deviceGetInfrastructure",
        "deviceGetPlatformInfo",
        "errorGetMessage",
        "memDeRegister",
        "setPowerConfig",
    ];
    call.ends_with("Free") || call.starts_with("profileGet") || SPARED.contains(&call)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_plan_reads_as_a_test_author_writes_it() {
        let text = r#"{"rules": [{"call": "graphExecute", "nth": 3, "then": {"restart": 1007}},
            {"nth": 9, "times": 2, "then": {"fail": 6004}}, {"call": "graphExecute", "then": "hang"}],
            "max_contexts": 8, "chip": {"arch": 73, "soc": 60, "vtcm_mb": 8}}"#;
        let plan: Plan = serde_json::from_str(text).expect("valid");
        let expected = Plan::at("graphExecute", 3, Then::Restart(1007));
        assert_eq!(plan.rules[0], expected.rules[0]);
        assert_eq!((plan.rules[1].call.as_deref(), plan.rules[1].times), (None, 2));
        assert_eq!((plan.rules[2].nth, plan.rules[2].then), (1, Then::Hang));
        assert_eq!(plan.max_contexts, Some(8));
        assert_eq!(plan.chip, Some(Chip { arch: 73, soc: 60, vtcm_mb: 8 }));
        assert!(serde_json::from_str::<Plan>(r#"{"max_context": 8}"#).is_err());
    }
}
