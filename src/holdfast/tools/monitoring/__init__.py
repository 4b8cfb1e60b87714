"""What a Prometheus and a Grafana are given: alerts with their tests, and dashboards."""
