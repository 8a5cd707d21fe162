/* What scripts/fct_ns3.py runs in ns-3: two fat-trees with a link between them that loses what it is told to lose, and
 * the two ends of a message. Compiled when the program starts.
 *
 * Written from docs/fct.md, and with nothing of megatron_lossy/lab/fct in it: both ends work out blocks, groups and parity for
 * themselves, the receiver decides by what arrives, and the sender by answers and clocks. What is not from here is which
 * packets of a message are lost, how often each is if it is sent again, and which are of high priority.
 *
 * All packets but those of data and parity are control packets, of 62 bytes, and cross the same links: END behind what is
 * over, ACK for one packet, NACK for those of a bitmap, DONE.
 */
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <deque>
#include <functional>
#include <vector>

#include "ns3/applications-module.h"
#include "ns3/core-module.h"
#include "ns3/internet-module.h"
#include "ns3/network-module.h"
#include "ns3/point-to-point-module.h"

namespace fct {

using ns3::NodeContainer;
using ns3::Packet;
using ns3::Ptr;
using ns3::Simulator;
using ns3::Time;

enum Kind : uint8_t { DATA, PARITY, END, ACK, NACK, DONE };
enum Recovery { REPEAT, UNIFORM, SMART, TOLERANT };

const uint16_t PORT = 4000;
const uint32_t BITS = 128; // of the bitmap of a NACK

/* Our own header. UDP has 8 bytes, IPv4 20 and PPP 2: 62 together. */
struct Wire {
    uint8_t kind = DATA;
    uint8_t all = 0;      // END: of the parity as well
    uint16_t attempt = 0; // how often it was sent before
    uint32_t flow = 0;
    uint32_t number = 0; // of the data, or of the parity; NACK: the first of the bitmap
    uint32_t place = 0;  // in the order in which all is sent first
    uint8_t bits[BITS / 8] = {};
};
static_assert(sizeof(Wire) == 32, "62 bytes of headers");
const uint32_t BELOW = 2 + 20 + 8; // what is in front of it on a link

struct Scheme {
    Recovery recovery;
    uint32_t block, parity;
    double bound;
    Time timeout; // between a packet that is sent again and the next time
};

/* What becomes of one message. */
struct Message {
    uint32_t flow = 0;
    std::vector<int> lost, lost_parity; // when first sent
    std::vector<int> again;             // by number of data: how often it must be sent again to arrive
    std::vector<int> high;              // numbers of data, rising
};

/* Who protects whom, and in which order all is sent first. Each end makes its own. */
struct Plan {
    struct Item {
        Kind kind;
        uint32_t number;
    };
    std::vector<Item> order;
    std::vector<std::vector<uint32_t>> members; // by parity: numbers of data
    std::vector<int> group;                     // by number of data: its parity, or -1
    std::vector<std::vector<uint32_t>> blocks;  // their data
    std::vector<uint32_t> last;                 // by block: the place of its last parity

    Plan() = default;

    Plan(const Scheme &scheme, const Message &message) {
        uint32_t packets = message.lost.size();
        std::vector<uint32_t> shielded;
        if (scheme.recovery == SMART)
            shielded.assign(message.high.begin(), message.high.end());
        else if (scheme.recovery != REPEAT)
            for (uint32_t number = 0; number < packets; number++)
                shielded.push_back(number);
        if (scheme.recovery == REPEAT || scheme.recovery == SMART)
            for (uint32_t number = 0; number < packets; number++)
                order.push_back({DATA, number});
        group.assign(packets, -1);
        for (uint32_t begin = 0; begin < shielded.size(); begin += scheme.block) {
            uint32_t end = std::min<uint32_t>(begin + scheme.block, shielded.size());
            uint32_t size = end - begin, first = members.size(), parities = scheme.parity;
            if (size < scheme.block) // in proportion, rounded up
                parities = std::max(1u, (scheme.parity * size + scheme.block - 1) / scheme.block);
            members.resize(first + parities);
            blocks.emplace_back();
            for (uint32_t i = 0; i < size; i++) {
                uint32_t number = shielded[begin + i];
                members[first + i % parities].push_back(number);
                group[number] = first + i % parities;
                blocks.back().push_back(number);
                if (scheme.recovery != SMART)
                    order.push_back({DATA, number});
            }
            for (uint32_t i = 0; i < parities; i++)
                order.push_back({PARITY, first + i});
            last.push_back(order.size() - 1);
        }
    }
};

/* The link between the data centers: what arrives there was lost or not before it was sent. */
class Loss : public ns3::ErrorModel {
  public:
    const Message *message = nullptr;

  private:
    bool DoCorrupt(Ptr<Packet> packet) override {
        uint8_t bytes[BELOW + sizeof(Wire)];
        if (packet->CopyData(bytes, sizeof bytes) < sizeof bytes)
            return false;
        Wire wire;
        std::memcpy(&wire, bytes + BELOW, sizeof wire);
        if (!message || wire.flow != message->flow)
            return false;
        if (wire.kind == PARITY)
            return message->lost_parity[wire.number];
        if (wire.kind != DATA)
            return false;
        return wire.attempt ? wire.attempt < message->again[wire.number] : message->lost[wire.number];
    }

    void DoReset() override {}
};

/* One end of all messages. */
class End : public ns3::Application {
  public:
    void Join(ns3::Ipv4Address other) { m_other = other; }

  protected:
    Scheme m_scheme;
    const Message *m_message = nullptr;
    Plan m_plan;

    void Take(const Scheme &scheme, const Message &message) {
        m_scheme = scheme;
        m_message = &message;
        m_plan = Plan(scheme, message);
    }

    uint32_t Packets() const { return m_message->lost.size(); }

    void Send(Wire wire, uint32_t payload) {
        wire.flow = m_message->flow;
        Ptr<Packet> packet = ns3::Create<Packet>(reinterpret_cast<const uint8_t *>(&wire), sizeof wire);
        packet->AddPaddingAtEnd(payload);
        if (m_socket->Send(packet) < 0)
            NS_FATAL_ERROR("a packet could not be sent");
    }

    virtual void Handle(const Wire &wire) = 0;

  private:
    Ptr<ns3::Socket> m_socket;
    ns3::Ipv4Address m_other;

    void StartApplication() override {
        m_socket = ns3::Socket::CreateSocket(GetNode(), ns3::UdpSocketFactory::GetTypeId());
        m_socket->Bind(ns3::InetSocketAddress(ns3::Ipv4Address::GetAny(), PORT));
        m_socket->Connect(ns3::InetSocketAddress(m_other, PORT));
        m_socket->SetRecvCallback(ns3::MakeCallback(&End::Read, this));
    }

    void Read(Ptr<ns3::Socket> socket) {
        while (Ptr<Packet> packet = socket->Recv()) {
            Wire wire;
            packet->CopyData(reinterpret_cast<uint8_t *>(&wire), sizeof wire);
            if (m_message && wire.flow == m_message->flow)
                Handle(wire);
        }
    }
};

class Sender : public End {
  public:
    Time slot;
    uint32_t payload = 0;
    Time started;
    uint32_t sent_again = 0, parities = 0;

    void Begin(const Scheme &scheme, const Message &message) {
        Take(scheme, message);
        m_next = sent_again = parities = 0;
        m_queue.clear();
        m_there.assign(Packets(), false);
        m_tries.assign(Packets(), 0);
        m_done = false;
        started = Simulator::Now();
        Pump();
    }

  private:
    uint32_t m_next = 0; // in the order of the plan
    std::deque<uint32_t> m_queue;
    std::vector<bool> m_there;
    std::vector<int> m_tries; // by number of data: how often it was asked for, or timed out
    bool m_busy = false, m_done = true;

    /* What is sent again first, then what is new, as long as there is one to send. */
    void Pump() {
        if (m_busy || m_done)
            return;
        Wire wire;
        if (!m_queue.empty()) {
            wire.number = m_queue.front();
            wire.attempt = m_tries[wire.number];
            m_queue.pop_front();
            sent_again++;
        } else if (m_next < m_plan.order.size()) {
            wire.kind = m_plan.order[m_next].kind;
            wire.number = m_plan.order[m_next].number;
            wire.place = m_next++;
            parities += wire.kind == PARITY;
        } else {
            return;
        }
        Send(wire, payload);
        m_busy = true;
        Simulator::Schedule(slot, &Sender::Left, this, wire);
    }

    void Left(Wire wire) {
        m_busy = false;
        if (m_done)
            return;
        if (wire.attempt || m_scheme.recovery == REPEAT) {
            Wait({wire.number});
        } else if (m_scheme.recovery == UNIFORM) {
            auto found = std::find(m_plan.last.begin(), m_plan.last.end(), wire.place);
            if (found != m_plan.last.end())
                Wait(m_plan.blocks[found - m_plan.last.begin()]);
        } else {
            Wire end;
            end.kind = END;
            end.all = wire.place + 1 == m_plan.order.size();
            if (end.all || (m_scheme.recovery == SMART && wire.place + 1 == Packets()))
                Send(end, 0);
        }
        Pump();
    }

    /* Send these once more if nothing is heard of them in time. */
    void Wait(const std::vector<uint32_t> &numbers) {
        std::vector<int> tries;
        for (uint32_t number : numbers)
            tries.push_back(m_tries[number]);
        uint32_t flow = m_message->flow;
        Simulator::Schedule(m_scheme.timeout, std::function<void()>([this, numbers, tries, flow] {
            if (m_done || m_message->flow != flow)
                return;
            for (size_t i = 0; i < numbers.size(); i++)
                if (!m_there[numbers[i]] && m_tries[numbers[i]] == tries[i])
                    Again(numbers[i]);
            Pump();
        }));
    }

    void Again(uint32_t number) {
        m_tries[number]++;
        m_queue.push_back(number);
    }

    void Handle(const Wire &wire) override {
        if (wire.kind == ACK)
            m_there[wire.number] = true;
        if (wire.kind == DONE)
            m_done = true;
        if (wire.kind == NACK)
            for (uint32_t i = 0; i < BITS; i++)
                if (wire.bits[i / 8] >> i % 8 & 1 && !m_tries[wire.number + i])
                    Again(wire.number + i);
        Pump();
    }
};

class Receiver : public End {
  public:
    bool late = false; // whether parity also serves when what was sent again arrives
    std::function<void()> delivered;
    Time ended;
    uint32_t zeros = 0;

    void Begin(const Scheme &scheme, const Message &message) {
        Take(scheme, message);
        m_there.assign(Packets(), false);
        m_missing = Packets();
        m_parity.assign(m_plan.members.size(), false);
        m_expected = m_block = 0;
        m_over = m_done = false;
    }

  private:
    std::vector<bool> m_there, m_parity;
    uint32_t m_expected = 0, m_block = 0; // the next place; the next block that is not over
    uint32_t m_missing = 0;               // of data
    bool m_over = false, m_done = true;

    void Handle(const Wire &wire) override {
        if (m_done)
            return;
        if (wire.kind == DATA)
            Arrived(wire.number, wire.attempt > 0);
        if (wire.kind == PARITY)
            m_parity[wire.number] = true;
        if (!wire.attempt || late) {
            if (wire.kind == DATA && m_plan.group[wire.number] >= 0)
                Replace(m_plan.group[wire.number]);
            if (wire.kind == PARITY)
                Replace(wire.number);
        }
        if ((wire.kind == DATA || wire.kind == PARITY) && !wire.attempt) {
            if (m_scheme.recovery == REPEAT && wire.place > m_expected) {
                std::vector<uint32_t> gap;
                for (uint32_t number = m_expected; number < wire.place; number++)
                    gap.push_back(number);
                Ask(gap);
            }
            m_expected = wire.place + 1;
            if (m_scheme.recovery == UNIFORM)
                for (; m_block < m_plan.last.size() && m_plan.last[m_block] <= wire.place; m_block++)
                    Ask(m_plan.blocks[m_block]);
        }
        if (wire.kind == END)
            Ended(wire.all);
        if (!m_done && Complete())
            Deliver();
    }

    void Arrived(uint32_t number, bool again) {
        m_missing -= !m_there[number];
        m_there[number] = true;
        if (again || m_scheme.recovery == REPEAT || m_scheme.recovery == UNIFORM) {
            Wire answer;
            answer.kind = ACK;
            answer.number = number;
            Send(answer, 0);
        }
    }

    /* A group of which only one is missing. */
    void Replace(uint32_t parity) {
        if (!m_parity[parity])
            return;
        int missing = -1;
        for (uint32_t number : m_plan.members[parity]) {
            if (m_there[number])
                continue;
            if (missing >= 0)
                return;
            missing = number;
        }
        if (missing >= 0)
            Arrived(missing, false);
    }

    /* A NACK for those of them that are missing. */
    void Ask(const std::vector<uint32_t> &numbers) {
        Wire ask;
        ask.kind = NACK;
        bool any = false;
        for (uint32_t number : numbers) {
            if (m_there[number])
                continue;
            if (any && number - ask.number >= BITS) {
                Send(ask, 0);
                std::memset(ask.bits, 0, sizeof ask.bits);
                any = false;
            }
            if (!any)
                ask.number = number;
            any = true;
            ask.bits[(number - ask.number) / 8] |= 1 << (number - ask.number) % 8;
        }
        if (any)
            Send(ask, 0);
    }

    void Ended(bool all) {
        m_over = true;
        if (m_scheme.recovery == SMART && all)
            Ask(std::vector<uint32_t>(m_message->high.begin(), m_message->high.end()));
        if (m_scheme.recovery == TOLERANT) {
            if (m_missing <= uint32_t(m_scheme.bound * Packets())) {
                Deliver();
                return;
            }
            std::vector<uint32_t> numbers(Packets());
            for (uint32_t number = 0; number < Packets(); number++)
                numbers[number] = number;
            Ask(numbers);
        }
    }

    bool Complete() const {
        if (m_scheme.recovery != SMART)
            return !m_missing;
        return m_over && std::all_of(m_message->high.begin(), m_message->high.end(), [this](int number) {
            return m_there[number];
        });
    }

    void Deliver() {
        m_done = true;
        ended = Simulator::Now();
        zeros = m_missing;
        Wire done;
        done.kind = DONE;
        Send(done, 0);
        delivered();
    }
};

/* Servers below edge switches, these below the aggregating ones of their pod, cores above all, and a border. */
class Tree {
  public:
    Ptr<ns3::Node> first, border;

    template <class Join> Tree(uint32_t k, NodeContainer &all, Join join) {
        uint32_t half = k / 2;
        NodeContainer cores = Nodes(half * half, all), borders = Nodes(1, all);
        border = borders.Get(0);
        for (uint32_t core = 0; core < half * half; core++)
            join(cores.Get(core), border);
        for (uint32_t pod = 0; pod < k; pod++) {
            NodeContainer edges = Nodes(half, all), aggregates = Nodes(half, all);
            for (uint32_t i = 0; i < half; i++) {
                NodeContainer servers = Nodes(half, all);
                for (uint32_t j = 0; j < half; j++) {
                    join(servers.Get(j), edges.Get(i));
                    join(edges.Get(i), aggregates.Get(j));
                    join(aggregates.Get(i), cores.Get(i * half + j));
                }
                if (!first)
                    first = servers.Get(0);
            }
        }
    }

  private:
    static NodeContainer Nodes(uint32_t count, NodeContainer &all) {
        NodeContainer nodes;
        nodes.Create(count);
        all.Add(nodes);
        return nodes;
    }
};

class Study {
  public:
    std::vector<double> times; // in microseconds
    std::vector<int> again, zeros, parities;
    uint32_t nodes = 0;

    /* Gbit/s and microseconds inside and between, and bytes of payload. */
    Study(double inside, double delay_inside, double between, double delay_between, uint32_t payload) {
        Time::SetResolution(Time::PS);
        struct Pair {
            Ptr<ns3::Node> one, other;
        };
        std::vector<Pair> pairs;
        auto join = [&pairs](Ptr<ns3::Node> one, Ptr<ns3::Node> other) { pairs.push_back({one, other}); };
        NodeContainer all;
        Tree here(4, all, join), there(4, all, join);
        nodes = all.GetN();
        join(here.border, there.border);

        ns3::InternetStackHelper stack;
        stack.SetIpv6StackInstall(false);
        stack.Install(all);
        ns3::Ipv4AddressHelper addresses("10.0.0.0", "255.255.255.252");
        for (const Pair &pair : pairs) {
            bool far = pair.one == here.border && pair.other == there.border;
            ns3::PointToPointHelper link;
            ns3::DataRate rate(uint64_t((far ? between : inside) * 1e9));
            link.SetDeviceAttribute("DataRate", ns3::DataRateValue(rate));
            link.SetDeviceAttribute("Mtu", ns3::UintegerValue(9000));
            Time delay = ns3::PicoSeconds(int64_t((far ? delay_between : delay_inside) * 1e6));
            link.SetChannelAttribute("Delay", ns3::TimeValue(delay));
            link.SetQueue("ns3::DropTailQueue", "MaxSize", ns3::StringValue("1000000p"));
            ns3::NetDeviceContainer devices = link.Install(pair.one, pair.other);
            addresses.Assign(devices);
            addresses.NewNetwork();
            ns3::TrafficControlHelper().Uninstall(devices); // no queue disciplines: a queue is a device's
            if (far) {
                m_loss = ns3::CreateObject<Loss>();
                ns3::DynamicCast<ns3::PointToPointNetDevice>(devices.Get(1))->SetReceiveErrorModel(m_loss);
            }
        }
        ns3::Ipv4GlobalRoutingHelper::PopulateRoutingTables();

        m_sender = ns3::CreateObject<Sender>();
        m_receiver = ns3::CreateObject<Receiver>();
        m_sender->payload = payload;
        m_sender->slot = ns3::DataRate(uint64_t(inside * 1e9)).CalculateBytesTxTime(payload + BELOW + sizeof(Wire));
        m_receiver->delivered = [this] { Delivered(); };
        m_sender->Join(Address(there.first));
        m_receiver->Join(Address(here.first));
        here.first->AddApplication(m_sender);
        there.first->AddApplication(m_receiver);
        Simulator::Run(); // they begin
    }

    ~Study() { Simulator::Destroy(); }

    void Add(std::vector<int> lost, std::vector<int> lost_parity, std::vector<int> again, std::vector<int> high) {
        m_messages.push_back({++m_flows, lost, lost_parity, again, high});
    }

    /* Send what was added, one message after another. ``timeout`` in microseconds. */
    void Run(int recovery, uint32_t block, uint32_t parity, double bound, double timeout, bool late) {
        m_scheme = {Recovery(recovery), block, parity, bound, ns3::PicoSeconds(int64_t(timeout * 1e6))};
        m_receiver->late = late;
        times.clear(), again.clear(), zeros.clear(), parities.clear();
        m_now = 0;
        Next();
        Simulator::Run();
        m_messages.clear();
    }

  private:
    Ptr<Loss> m_loss;
    Ptr<Sender> m_sender;
    Ptr<Receiver> m_receiver;
    std::vector<Message> m_messages;
    Scheme m_scheme;
    uint32_t m_flows = 0;
    size_t m_now = 0;

    static ns3::Ipv4Address Address(Ptr<ns3::Node> node) {
        return node->GetObject<ns3::Ipv4>()->GetAddress(1, 0).GetLocal();
    }

    void Next() {
        if (m_now == m_messages.size())
            return;
        // By then nothing of the message before is on its way any more.
        Time pause = ns3::MilliSeconds(100);
        Simulator::ScheduleWithContext(m_sender->GetNode()->GetId(), pause, std::function<void()>([this] {
            const Message &message = m_messages[m_now];
            m_loss->message = &message;
            m_receiver->Begin(m_scheme, message);
            m_sender->Begin(m_scheme, message);
        }));
    }

    void Delivered() {
        times.push_back((m_receiver->ended - m_sender->started).ToDouble(Time::US));
        again.push_back(m_sender->sent_again);
        zeros.push_back(m_receiver->zeros);
        parities.push_back(m_sender->parities);
        m_now++;
        Next();
    }
};

} // namespace fct
