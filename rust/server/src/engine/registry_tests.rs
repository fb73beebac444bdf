use super::*;

const LIMIT: usize = 8;

fn request(n: u32) -> NewRequest {
    NewRequest {
        grammar: None,
        prompt: vec![10, 11],
        params: SamplingParams {
            n,
            seed: 5,
            ..SamplingParams::default()
        },
        priority: 0,
        tenant: 0,
        namespace: 0,
    }
}

struct Engine {
    inbox: mpsc::UnboundedReceiver<ToEngine>,
}

impl Engine {
    fn connect(registry: &Registry) -> Self {
        Self::connect_as(registry, 0)
    }

    fn connect_as(registry: &Registry, replica: usize) -> Self {
        let (sender, inbox) = mpsc::unbounded_channel();
        registry.connect(replica, sender, 1 << 16);
        Self { inbox }
    }

    fn messages(&mut self) -> Vec<ToEngine> {
        std::iter::from_fn(|| self.inbox.try_recv().ok()).collect()
    }

    fn added(&mut self) -> Vec<AddRequest> {
        let messages = self.messages().into_iter();
        messages
            .filter_map(|message| match message {
                ToEngine::Add(add) => Some(*add),
                _ => None,
            })
            .collect()
    }
}

fn tokens(wire: u64, choice: u32, token_ids: &[u32], finish: Option<Finish>) -> Update {
    Update {
        id: wire,
        choices: vec![ChoiceUpdate {
            index: choice,
            token_ids: token_ids.to_vec(),
            logprobs: Vec::new(),
            finish,
        }],
        finished: finish.is_some(),
        ..Update::default()
    }
}

fn received(ticket: &mut Ticket) -> Vec<(u32, Vec<u32>)> {
    let mut found = Vec::new();
    while let Ok(event) = ticket.events.try_recv() {
        if let News::Choice(choice) = event.news {
            found.push((choice.index, choice.token_ids));
        }
    }
    found
}

#[test]
fn after_a_death_a_request_goes_on_where_it_stopped() {
    let registry = Arc::new(Registry::new(1));
    let mut engine = Engine::connect(&registry);
    let mut ticket = registry.submit(vec![request(1)], LIMIT).unwrap();
    let first = engine.added().remove(0);
    assert_eq!(
        (first.tokens.as_slice(), first.num_prompt_tokens),
        (&[10, 11][..], 2)
    );
    registry.update(0, vec![tokens(first.id, 0, &[1, 2], None)]);
    registry.disconnect(0, &[first.id], true);

    let mut engine = Engine::connect(&registry);
    let again = engine.added().remove(0);
    assert_eq!(
        (again.tokens.as_slice(), again.num_prompt_tokens),
        (&[10, 11, 1, 2][..], 2)
    );
    assert_eq!(again.params.seed, 5);
    registry.update(0, vec![tokens(first.id, 0, &[9], None)]);
    registry.update(0, vec![tokens(again.id, 0, &[3], Some(Finish::Length))]);
    assert_eq!(
        received(&mut ticket),
        [(0, vec![1, 2]), (0, vec![3])],
        "a late message of the dead is dropped"
    );
    assert_eq!(registry.len(), 0);
}

#[test]
fn choices_part_after_a_death_and_those_that_ended_do_not_run_again() {
    let registry = Arc::new(Registry::new(1));
    let mut engine = Engine::connect(&registry);
    let ticket = registry.submit(vec![request(3)], LIMIT).unwrap();
    let first = engine.added().remove(0);
    assert_eq!(first.params.n, 3);
    registry.update(
        0,
        vec![
            tokens(first.id, 0, &[1], None),
            tokens(first.id, 2, &[7], None),
        ],
    );
    ticket.end_choice(0, 2);
    assert_eq!(
        engine.messages(),
        [ToEngine::AbortChoice {
            id: first.id,
            choice: 2
        }]
    );
    registry.disconnect(0, &[], true);

    let mut engine = Engine::connect(&registry);
    let again = engine.added();
    let shapes: Vec<_> = again
        .iter()
        .map(|add| (add.first_choice, add.params.n, add.tokens.as_slice()))
        .collect();
    assert_eq!(shapes, [(0, 1, &[10, 11, 1][..]), (1, 1, &[10, 11][..])]);
}

#[test]
fn a_ticket_that_is_dropped_leaves_nothing_in_the_engine() {
    let registry = Arc::new(Registry::new(1));
    let mut engine = Engine::connect(&registry);
    let ticket = registry
        .submit(vec![request(1), request(2)], LIMIT)
        .unwrap();
    let wires: Vec<u64> = engine.added().iter().map(|add| add.id).collect();
    drop(ticket);
    let aborts: Vec<ToEngine> = wires.into_iter().map(|id| ToEngine::Abort { id }).collect();
    assert_eq!(engine.messages(), aborts);
    assert!(
        registry.submit(vec![request(LIMIT as u32)], LIMIT).is_ok(),
        "their room is free again"
    );
}

#[test]
fn more_than_the_limit_is_refused_whole() {
    let registry = Arc::new(Registry::new(1));
    let _ticket = registry.submit(vec![request(6)], LIMIT).unwrap();
    let refused = registry
        .submit(vec![request(1), request(2)], LIMIT)
        .unwrap_err();
    assert_eq!(refused, SubmitError::Full(LIMIT));
    let refused = registry.submit(vec![request(9)], LIMIT).unwrap_err();
    assert_eq!(refused, SubmitError::TooMany(LIMIT));
    assert_eq!(registry.len(), 1);
}

#[test]
fn a_request_that_kills_the_engine_alone_is_ended_and_the_others_go_on() {
    let registry = Arc::new(Registry::new(1));
    let requests: Vec<NewRequest> = (0..5).map(|_| request(1)).collect();
    let mut ticket = registry.submit(requests, LIMIT).unwrap();
    let deadly_place = 3;
    let (mut finished, mut failed) = (Vec::new(), Vec::new());
    for _ in 0..10 {
        let mut engine = Engine::connect(&registry);
        loop {
            let wires = engine.added();
            if wires.is_empty() {
                break;
            }
            // The registry hands out requests in their order, and ids with them.
            let ids: Vec<u64> = wires.iter().map(|add| add.id).collect();
            let deadly = ids
                .iter()
                .copied()
                .find(|&id| registry.place_of(id) == deadly_place);
            if deadly.is_some() {
                registry.disconnect(0, &ids, false);
                break;
            }
            for id in ids {
                registry.update(0, vec![tokens(id, 0, &[1], Some(Finish::Length))]);
            }
        }
        while let Ok(event) = ticket.events.try_recv() {
            match event.news {
                News::Choice(_) => finished.push(event.place),
                News::Failed(error) => failed.push((event.place, error.status.as_u16())),
                News::Prompt { .. } | News::Vector(_) => {}
            }
        }
    }
    finished.sort_unstable();
    assert_eq!(finished, [0, 1, 2, 4]);
    assert_eq!(failed, [(deadly_place, 500)]);
}

#[test]
fn an_engine_that_is_going_ends_no_choice() {
    let registry = Arc::new(Registry::new(1));
    let mut engine = Engine::connect(&registry);
    let mut ticket = registry.submit(vec![request(1)], LIMIT).unwrap();
    let first = engine.added().remove(0);
    registry.update(0, vec![tokens(first.id, 0, &[4], Some(Finish::Abort))]);
    registry.disconnect(0, &[], true);
    let again = Engine::connect(&registry).added().remove(0);
    assert_eq!(again.tokens, [10, 11, 4]);
    assert_eq!(received(&mut ticket), [(0, vec![4])]);
}

impl Registry {
    fn place_of(&self, wire: u64) -> u32 {
        let inner = self.lock();
        inner.requests[&inner.wires[&wire]].place
    }
}

fn two() -> (Arc<Registry>, [Engine; 2]) {
    let registry = Arc::new(Registry::new(2));
    let engines = [0, 1].map(|replica| Engine::connect_as(&registry, replica));
    (registry, engines)
}

#[test]
fn the_requests_of_a_replica_that_dies_go_on_in_the_other_one() {
    let (registry, mut engines) = two();
    let mut ticket = registry
        .submit(vec![request(1), request(1)], LIMIT)
        .unwrap();
    let [first, second] = [0, 1].map(|replica| engines[replica].added().remove(0));
    registry.update(0, vec![tokens(first.id, 0, &[1], None)]);
    registry.disconnect(0, &[first.id], true);
    let moved = engines[1].added().remove(0);
    assert_eq!(moved.tokens, [10, 11, 1]);
    registry.update(1, vec![tokens(moved.id, 0, &[2], Some(Finish::Length))]);
    registry.update(1, vec![tokens(second.id, 0, &[3], Some(Finish::Length))]);
    assert_eq!(
        received(&mut ticket),
        [(0, vec![1]), (0, vec![2]), (0, vec![3])]
    );
    assert_eq!(registry.len(), 0);
}

#[test]
fn suspects_stay_with_the_replica_that_they_killed_and_others_do_not_go_there() {
    let (registry, mut engines) = two();
    let _ticket = registry.submit(vec![request(1)], LIMIT).unwrap();
    let suspect = engines[0].added().remove(0);
    registry.disconnect(0, &[suspect.id], false);
    assert_eq!(engines[1].added(), [], "it might kill that one too");
    engines[0] = Engine::connect_as(&registry, 0);
    let again = engines[0].added().remove(0);
    let _others = registry
        .submit(vec![request(1), request(1), request(1)], LIMIT)
        .unwrap();
    assert_eq!(engines[0].added(), []);
    assert_eq!(engines[1].added().len(), 3);
    registry.update(0, vec![tokens(again.id, 0, &[1], None)]);
    let _more = registry.submit(vec![request(1)], LIMIT).unwrap();
    assert_eq!(engines[0].added().len(), 1, "it is cleared");
}

#[test]
fn a_replica_that_comes_late_takes_over_requests_that_wait() {
    let registry = Arc::new(Registry::new(2));
    let mut first = Engine::connect_as(&registry, 0);
    let _ticket = registry
        .submit((0..6).map(|_| request(1)).collect(), LIMIT)
        .unwrap();
    let begun = first.added().remove(0);
    registry.update(0, vec![tokens(begun.id, 0, &[1], None)]);
    let mut second = Engine::connect_as(&registry, 1);
    assert_eq!(second.added().len(), 3);
}

#[test]
fn a_replica_that_cannot_start_ends_the_requests_that_only_it_may_run() {
    let (registry, mut engines) = two();
    let mut ticket = registry.submit(vec![request(1)], LIMIT).unwrap();
    let suspect = engines[0].added().remove(0);
    registry.disconnect(0, &[suspect.id], false);
    registry.give_up(0, &ApiError::failed("no device"));
    let event = ticket.events.try_recv().unwrap();
    assert!(matches!(event.news, News::Failed(_)), "{event:?}");
    assert_eq!(registry.len(), 0);
}
