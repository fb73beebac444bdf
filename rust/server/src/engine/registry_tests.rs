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
        let (sender, inbox) = mpsc::unbounded_channel();
        registry.connect(sender);
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
    let registry = Arc::new(Registry::default());
    let mut engine = Engine::connect(&registry);
    let mut ticket = registry.submit(vec![request(1)], LIMIT).unwrap();
    let first = engine.added().remove(0);
    assert_eq!(
        (first.tokens.as_slice(), first.num_prompt_tokens),
        (&[10, 11][..], 2)
    );
    registry.update(vec![tokens(first.id, 0, &[1, 2], None)]);
    registry.disconnect(&[first.id], true);

    let mut engine = Engine::connect(&registry);
    let again = engine.added().remove(0);
    assert_eq!(
        (again.tokens.as_slice(), again.num_prompt_tokens),
        (&[10, 11, 1, 2][..], 2)
    );
    assert_eq!(again.params.seed, 5);
    registry.update(vec![tokens(first.id, 0, &[9], None)]);
    registry.update(vec![tokens(again.id, 0, &[3], Some(Finish::Length))]);
    assert_eq!(
        received(&mut ticket),
        [(0, vec![1, 2]), (0, vec![3])],
        "a late message of the dead is dropped"
    );
    assert_eq!(registry.len(), 0);
}

#[test]
fn choices_part_after_a_death_and_those_that_ended_do_not_run_again() {
    let registry = Arc::new(Registry::default());
    let mut engine = Engine::connect(&registry);
    let ticket = registry.submit(vec![request(3)], LIMIT).unwrap();
    let first = engine.added().remove(0);
    assert_eq!(first.params.n, 3);
    registry.update(vec![
        tokens(first.id, 0, &[1], None),
        tokens(first.id, 2, &[7], None),
    ]);
    ticket.end_choice(0, 2);
    assert_eq!(
        engine.messages(),
        [ToEngine::AbortChoice {
            id: first.id,
            choice: 2
        }]
    );
    registry.disconnect(&[], true);

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
    let registry = Arc::new(Registry::default());
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
    let registry = Arc::new(Registry::default());
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
    let registry = Arc::new(Registry::default());
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
                registry.disconnect(&ids, false);
                break;
            }
            for id in ids {
                registry.update(vec![tokens(id, 0, &[1], Some(Finish::Length))]);
            }
        }
        while let Ok(event) = ticket.events.try_recv() {
            match event.news {
                News::Choice(_) => finished.push(event.place),
                News::Failed(error) => failed.push((event.place, error.status.as_u16())),
                News::Prompt { .. } => {}
            }
        }
    }
    finished.sort_unstable();
    assert_eq!(finished, [0, 1, 2, 4]);
    assert_eq!(failed, [(deadly_place, 500)]);
}

#[test]
fn an_engine_that_is_going_ends_no_choice() {
    let registry = Arc::new(Registry::default());
    let mut engine = Engine::connect(&registry);
    let mut ticket = registry.submit(vec![request(1)], LIMIT).unwrap();
    let first = engine.added().remove(0);
    registry.update(vec![tokens(first.id, 0, &[4], Some(Finish::Abort))]);
    registry.disconnect(&[], true);
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
